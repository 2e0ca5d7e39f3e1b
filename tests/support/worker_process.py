"""A real worker process, and the server's end of its wire, page and output, for tests without an event loop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from marserve import wire
from marserve.messages import Batch, Item, ToWorker, pack_head
from marserve.shared_page import Page, create_page
from support.running_pool import worker_environment


class WorkerUnderTest:
    """One `python -m marserve.worker`. Use it as a context manager; its end sees to the process's."""

    def __init__(self, *, parent: int | None = None, role: str = "worker") -> None:
        self.connection, theirs = socket.socketpair()
        self.connection.settimeout(20)
        descriptor = create_page()
        self.page = Page(descriptor)
        self._decoder = wire.server_decoder()
        self._heard: list[tuple[Any, list[bytes]]] = []
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "marserve.worker", role),
                    *(str(os.getpid() if parent is None else parent), str(theirs.fileno()), str(descriptor)),
                ],
                # One thread, as launchers say: some versions of Pillow import numpy, which starts one for each core.
                env={**worker_environment(), "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(), descriptor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        os.close(descriptor)

    def __enter__(self) -> WorkerUnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.page.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=20)

    def tell(self, message: ToWorker, bodies: Sequence[bytes] = ()) -> None:
        """Send a message."""
        self.connection.sendall(b"".join(wire.encode(message, bodies)))

    def batch(self, number: int, *bodies: bytes) -> None:
        """Send a batch of raw bodies."""
        items = [Item(f"r{index}", [("body", None)], pack_head([], []), None) for index in range(len(bodies))]
        self.tell(Batch(number, items), bodies)

    def hear(self) -> tuple[Any, list[bytes]]:
        """The next message of the worker's, with its bodies. Raises EOFError at the end."""
        while not self._heard:
            data = self.connection.recv(65536)
            if not data:
                raise EOFError
            self._heard += self._decoder.feed(data)
        return self._heard.pop(0)

    def end(self) -> tuple[int, str, str]:
        """Wait for the process's end: its status and what it printed."""
        out, err = self.process.communicate(timeout=20)
        return self.process.returncode, out.decode(), err.decode()
