"""nginx as an origin, each connection as slow as a test wants it; and nginx in front of servers."""

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
events {{ worker_connections 1024; }}
http {{
  access_log {folder}/access.log; keepalive_requests 10000;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  {what}
}}
"""
ORIGIN = "server {{ listen 127.0.0.1:{port}; root {root}; limit_rate {rate}; }}"


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
    [port] = free_ports(1)
    with running(folder, ORIGIN.format(port=port, root=root, rate=bytes_per_s), port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running(folder: Path, what: str, port: int) -> Iterator[None]:
    """An nginx that listens on `port`; `what` stands in its `http` block. It runs until the end of the block."""
    path = program()
    folder.mkdir()
    user = Path("/proc/self").owner()
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, what=what, user=user))
    errors = folder / "error.log"
    process = subprocess.Popen([path, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(errors)])
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            assert process.poll() is None, errors.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait(10)
