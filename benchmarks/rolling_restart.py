"""A rolling restart: two servers behind nginx are stopped and started one after the other, at 1,000 requests a second.

Counted are requests that got no good answer, and measured the 99th percentile of all of them, beside that of the same
load while nobody is restarted. The servers have the delay of containers, five seconds.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from figures import Figure, Goal
from load_generator import CannotMeasure
from open_loop import Sent, poisson, send
from plan import Plan
from servers import Marserve, free_ports, make_archive

RATE, QUICK_RATE = 1000, 200
DELAY_S, QUICK_DELAY_S = 5.0, 0.5
REST_S = 2.0
BODY = b"x" * 100
MOST_SLOWER = 2.0
CONFIG = """
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1; user {user};
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  upstream marserve {{
    server 127.0.0.1:{ports[0]} max_fails=0; server 127.0.0.1:{ports[1]} max_fails=0; keepalive 64;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://marserve; proxy_http_version 1.1;
      proxy_set_header Connection ""; proxy_set_header Host $http_host;
      proxy_next_upstream error http_503 non_idempotent;
    }}
  }}
}}
"""


def measure(plan: Plan) -> list[Figure]:
    """The figures of a rolling restart. Raises CannotMeasure where there is no nginx."""
    rate = QUICK_RATE if plan.is_quick else RATE
    delay_s = QUICK_DELAY_S if plan.is_quick else DELAY_S
    archive = make_archive(plan.folder / "rolling", "echo", "echo.py", {"minWorkers": 1, "maxWorkers": 1})
    failed: list[float] = []
    moving: list[float] = []
    quiet: list[float] = []
    for number in range(plan.rounds):
        plan.say(f"rolling restart: round {number + 1} of {plan.rounds}")
        with _two_behind_nginx(plan, archive, delay_s) as pair, _client() as client:
            _load(client, pair.port, rate, 1.0, number)  # warm
            span_s, still = _measured(pair, client, rate, number, is_restarted=False)
            span_s, moved = _measured(pair, client, rate, number, is_restarted=True)
        plan.say(f"rolling restart: took {span_s:.0f} s, {len(moved.latencies)} answered, {moved.refused} not")
        quiet.append(1000 * still.percentile(0.99))
        moving.append(1000 * moved.percentile(0.99))
        failed.append(float(moved.refused))
    return [
        Figure(
            f"rolling restart of two behind nginx, {rate} requests/s: not answered",
            "requests",
            failed,
            goal=Goal("at most", 0, "own"),
        ),
        Figure(
            "rolling restart: p99 of all requests",
            "ms",
            moving,
            beside="nobody restarts",
            other=quiet,
            goal=Goal("at most", MOST_SLOWER, "compared"),
            digits=1,
        ),
    ]


class _Pair:
    """Two servers that can be restarted, and the port of what spreads requests over them."""

    def __init__(self, plan: Plan, archive: Path, delay_s: float) -> None:
        self.port, *self.ports = free_ports(3)
        self._plan, self._archive = plan, archive
        self._settings = {"drain_delay": str(delay_s)}
        self._servers: list[Marserve] = []

    def start(self) -> None:
        """Start both. Raises CannotMeasure."""
        for port in self.ports:
            self._servers.append(self._start(port))

    def restart(self) -> None:
        """Stop and start one after the other, with a rest before each and at the end."""
        for index, port in enumerate(self.ports):
            time.sleep(REST_S)
            self._servers[index].stop()
            self._servers[index] = self._start(port)
        time.sleep(REST_S)

    def stop(self) -> None:
        """Stop both."""
        for server in self._servers:
            with contextlib.suppress(Exception):  # one that a restart has stopped, and could not start again
                server.stop()

    def _start(self, port: int) -> Marserve:
        folder = self._plan.new_folder("rolling-server")
        return Marserve("marserve", self._archive, folder, settings=self._settings, port=port)


@contextlib.contextmanager
def _two_behind_nginx(plan: Plan, archive: Path, delay_s: float) -> Iterator[_Pair]:
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is None:
        raise CannotMeasure("There is no nginx; install one (Debian: apt-get install nginx-light).")
    pair = _Pair(plan, archive, delay_s)
    folder = plan.new_folder("rolling-nginx")
    folder.mkdir(parents=True)
    config = folder / "nginx.conf"
    user = Path("/proc/self").owner()
    config.write_text(CONFIG.format(folder=folder, user=user, port=pair.port, ports=pair.ports))
    with contextlib.ExitStack() as stack:
        stack.callback(pair.stop)
        pair.start()
        process = subprocess.Popen([nginx, "-p", str(folder), "-c", str(config), "-e", str(folder / "error.log")])
        stack.callback(process.wait)
        stack.callback(process.terminate)
        yield pair


def _measured(
    pair: _Pair, client: ProcessPoolExecutor, rate: float, seed: int, *, is_restarted: bool
) -> tuple[float, Sent]:
    """A load until both were restarted, or for five rests; how long that was, in seconds, and what came of it."""
    if not is_restarted:
        return 5 * REST_S, _load(client, pair.port, rate, 5 * REST_S, seed)
    failure: list[BaseException] = []

    def restart() -> None:
        try:
            pair.restart()
        except BaseException as error:
            failure.append(error)

    began = time.monotonic()
    restarting = threading.Thread(target=restart)
    restarting.start()
    sent = Sent()
    try:
        while restarting.is_alive():
            part = _load(client, pair.port, rate, REST_S, seed := seed + 1)
            sent.latencies += part.latencies
            sent.refused += part.refused
    finally:
        restarting.join()  # a server that it is just starting would be left behind
    if failure:
        raise CannotMeasure(f"a server could not be restarted: {failure[0]}")
    return time.monotonic() - began, sent


def _client() -> ProcessPoolExecutor:
    """A process of its own to send from: whoever restarts servers would make it late."""
    return ProcessPoolExecutor(1, get_context("spawn"))


def _load(client: ProcessPoolExecutor, port: int, rate: float, seconds: float, seed: int) -> Sent:
    dues = poisson(rate, seconds, seed)
    return client.submit(send, port, "/predictions/echo", dues, [BODY] * len(dues)).result()
