"""nginx as an origin that gives each connection so many bytes a second, over one folder of files."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from load_generator import CannotMeasure
from servers import free_ports

CONFIG = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 100000;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen 127.0.0.1:{port}; root {root}; limit_rate {rate}; }}
}}
"""


@contextmanager
def slow_origin(folder: Path, root: Path, bytes_per_s: int) -> Iterator[str]:
    """The URL of an nginx that serves `root`, each connection at so many bytes a second (0: as fast as it goes)."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not Path(program).exists():
        raise CannotMeasure("nginx is not installed (apt-get install nginx-light)")
    folder.mkdir(parents=True)
    [port] = free_ports(1)
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, root=root, rate=bytes_per_s))
    command = [program, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")]
    # The master runs as whoever measures; its worker must be able to read the files.
    process = subprocess.Popen([*command, "-g", "user root;"] if Path("/proc/self").owner() == "root" else command)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(url + "/", timeout=1)
                break
            if process.poll() is not None:
                raise CannotMeasure(f"nginx ended: {(folder / 'error.log').read_text()[-500:]}")
            time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait(10)
