"""nginx as an origin: a real web server, each connection as slow as a test wants it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.server import free_ports

CONFIG = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1; user {user};
events {{ worker_connections 256; }}
http {{
  access_log {folder}/access.log; keepalive_requests 10000;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}; limit_rate {rate}; }}
}}
"""


def program() -> str:
    """Where nginx is. Skips the test where it is not."""
    for place in ("nginx", "/usr/sbin/nginx"):
        found = shutil.which(place)
        if found is not None:
            return found
    pytest.skip("nginx is not installed (apt-get install nginx-light)")


@contextmanager
def nginx(folder: Path, root: Path, *, bytes_per_s: int = 0) -> Iterator[str]:
    """The URL of an nginx that serves `root`, each answer at so many bytes a second (0: as fast as it goes)."""
    path = program()
    folder.mkdir()
    [port] = free_ports(1)
    user = Path("/proc/self").owner()
    facts = {"folder": folder, "port": port, "root": root, "rate": bytes_per_s, "user": user}
    (folder / "nginx.conf").write_text(CONFIG.format(**facts))
    errors = folder / "error.log"
    process = subprocess.Popen([path, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(errors)])
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            assert process.poll() is None, errors.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)
