"""What goes on while archives are fetched from an address that sends nothing."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from support.file_server import file_server, status
from support.server import Server, make_archive, poll

ECHO = "def handle(data, context):\n    return [bytes(row['body']) for row in data] if data else None\n"


def test_a_worker_is_replaced_while_every_download_is_stuck(tmp_path: Path) -> None:
    """Downloads have threads of their own number: what the pools need threads for does not wait behind them."""
    released = threading.Event()

    def stick(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "1000")
        handler.end_headers()
        released.wait(60)

    with file_server() as files:
        server = Server(
            tmp_path,
            settings={"allowed_urls": f"{files.url}/.*", "workflow_store": str(tmp_path / "store")},
        )
        make_archive(server.store / "echo.mar", ECHO)
        for number in range(5):
            files.on(f"/m{number}.mar", stick, status(404))
            files.on(f"/w{number}.war", stick, status(404))
        with server, ThreadPoolExecutor(10) as callers:
            assert server.register("echo.mar").status_code == 200
            [worker] = server.worker_pids("echo")
            calls = [
                callers.submit(server.client.post, f"{server.management}/{kind}", params={"url": f"{files.url}/{name}"})
                for number in range(5)
                for kind, name in (("models", f"m{number}.mar"), ("workflows", f"w{number}.war"))
            ]
            for _ in poll(20, "as many downloads as there may be have begun"):
                if len(files.asked) >= 8:
                    break

            try:
                os.kill(worker, signal.SIGKILL)
                for _ in poll(15, "the worker is replaced"):
                    if server.worker_pids("echo") not in ([], [worker]):
                        break
                answer = server.predict("echo", b"here")
            finally:
                released.set()

            assert (answer.status_code, answer.content) == (200, b"here")
            assert {call.result().status_code for call in calls} == {400}
