"""One file of LitServe, served by LitServe and by `marserve run`: LitServe's own client sees no difference."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from clients.environments import Client
from support.processes import until_blocking
from support.server import free_ports

pytestmark = pytest.mark.clients

LIMIT_S = 120.0

PLAIN = """
import litserve as ls
from fastapi import HTTPException


class MyLitAPI(ls.LitAPI):
    def setup(self, device):
        self.scale = 2.0 if device == "cpu" else 0.0

    def decode_request(self, request):
        if request["input"] < 0:
            raise HTTPException(status_code=422, detail="it is negative")
        return request["input"]

    def predict(self, x):
        return self.scale * x

    def encode_response(self, output):
        return {"output": output}


if __name__ == "__main__":
    ls.LitServer(MyLitAPI(), accelerator="cpu").run(port=PORT, generate_client_file=False)
"""

BATCHED = """
import numpy
import litserve as ls


class MyLitAPI(ls.LitAPI):
    def setup(self, device):
        self.weights = numpy.arange(3.0)

    def decode_request(self, request):
        return numpy.asarray(request["input"], dtype=float)

    def batch(self, inputs):
        return numpy.stack([numpy.atleast_1d(each) for each in inputs])

    def predict(self, x):
        return x * self.weights

    def encode_response(self, output):
        return {"output": output.tolist()}


if __name__ == "__main__":
    ls.LitServer(MyLitAPI(max_batch_size=4, batch_timeout=0.05), accelerator="cpu").run(
        port=PORT, generate_client_file=False
    )
"""

STREAMED = """
import litserve as ls


class MyLitAPI(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["input"]

    def predict(self, x):
        for number in range(3):
            yield number * x

    def encode_response(self, outputs):
        for output in outputs:
            yield {"output": output}


if __name__ == "__main__":
    ls.LitServer(MyLitAPI(stream=True), accelerator="cpu").run(port=PORT, generate_client_file=False)
"""

FILES: dict[str, tuple[str, list[Any]]] = {
    "plain": (PLAIN, [4.0, 0, 1e300, -1]),
    "batched": (BATCHED, [4.0, [1, 2, 3], 0]),
    "streamed": (STREAMED, [4.0, "ab"]),
}


def processes_of(session: int) -> list[psutil.Process]:
    """The processes of this session, also those whose parent has ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) == session:
                found.append(process)
    return found


def is_there(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended may not have been reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def served(words: Sequence[str], folder: Path, port: int) -> Iterator[str]:
    """A server in a process of its own, until it answers; its address of predictions."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MARSERVE_", "TS_"))}
    log = folder / f"{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=folder, env=variables, stdout=output, stderr=output, start_new_session=True
        )

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.post(url, json={"input": 1}, timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    url = f"http://127.0.0.1:{port}/predict"
    try:
        until_blocking(answers, f"the first answer of {url}", timeout_s=LIMIT_S)
        yield url
    finally:
        started = processes_of(process.pid)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for each in started:  # LitServe leaves its workers behind when it is terminated
            with suppress(psutil.Error):
                each.kill()
        process.wait(30)
        until_blocking(lambda: not any(map(is_there, started)), f"the end of all processes of {url}")


@pytest.mark.parametrize("kind", FILES)
def test_litserves_own_client_sees_no_difference(tmp_path: Path, kind: str) -> None:
    """The same file, unchanged; statuses and bodies of every request, byte for byte."""
    client = Client.of("litserve")
    text, inputs = FILES[kind]
    theirs, ours = free_ports(2)
    file = tmp_path / "server.py"
    file.write_text(text.replace("PORT", str(theirs)))
    run = [client.program, "-m", "marserve.cli", "run", "server.py:MyLitAPI", "--port", str(ours)]
    with ExitStack() as stack:
        litserve = stack.enter_context(served([client.program, "server.py"], tmp_path, theirs))
        marserve = stack.enter_context(served(run, tmp_path, ours))

        printed = [client.run(port) for port in (theirs, ours)]
        answers = [
            [httpx.post(url, json={"input": each}, timeout=30) for each in inputs] for url in (litserve, marserve)
        ]

    assert printed[0] == printed[1]
    assert printed[0].startswith("Status: 200\n")
    assert [(each.status_code, each.content) for each in answers[0]] == [
        (each.status_code, each.content) for each in answers[1]
    ]
