"""Start: how long until the first answer.

Measured from the start of the command to the first good answer of the model, asked every few milliseconds:

    no model            marserve with an empty store, until `/readyz` is 200
    echo model          marserve with a handler that loads nothing, beside the bare ASGI application
    TorchScript model   marserve with a handler that imports torch, beside a plain interpreter that imports torch, loads
                        the same file and runs it once (the model's own load, which no server can spare). The
                        difference is what marserve adds.

The first round is thrown away: it warms the file cache for all.
"""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from figures import Figure, Goal
from load_generator import CannotMeasure
from plan import Plan
from servers import HANDLERS, BareAsgi, Marserve, Server, free_ports, make_archive

SMALL_MODEL_LAYERS = 1


def measure(plan: Plan) -> list[Figure]:
    """The figures of starting."""
    config = {"minWorkers": 1, "maxWorkers": 1}
    echo = make_archive(plan.folder / "start-echo", "echo", "echo.py", config)
    empty: list[float] = []
    own: list[float] = []
    bare: list[float] = []
    for number in range(plan.rounds + 1):
        plan.say(f"start: round {number} of {plan.rounds}" if number else "start: warming the file cache")
        with Empty(plan.new_folder("start")) as ready:
            empty.append(ready.start_s)
        with Marserve("marserve", echo, plan.new_folder("start")) as server:
            own.append(server.start_s)
        with BareAsgi(plan.new_folder("start")) as server_beside:
            bare.append(server_beside.start_s)
    within = Goal("at most", 1.0, "own")
    figures = [
        Figure("start until ready, no model", "s", empty[1:], goal=within, digits=2),
        Figure("start to first answer, echo", "s", own[1:], "bare ASGI", bare[1:], "difference", within, digits=2),
    ]
    if find_spec("torch") is None:
        plan.say("start: torch is not installed, so the start with a TorchScript model is left out")
        return figures
    return [*figures, _torchscript(plan)]


class Empty(Server):
    """`marserve start --foreground` on an empty store; it is up when it says that it is ready."""

    def __init__(self, folder: Path) -> None:
        (folder / "store").mkdir(parents=True)
        inference, management, metrics, *grpc = free_ports(5)
        addresses = {"inference": inference, "management": management, "metrics": metrics}
        lines = [f"{name}_address=http://127.0.0.1:{port}\n" for name, port in addresses.items()]
        lines += [
            f"{name}_port={port}\n" for name, port in zip(("grpc_inference", "grpc_management"), grpc, strict=True)
        ]
        (folder / "config.properties").write_text("".join(lines))
        command = [sys.executable, "-m", "marserve.cli", "start", "--foreground", "--model-store", "store"]
        super().__init__("marserve without models", command, inference, "/readyz", folder)

    def ask(self, body: bytes | None = None, *, path: str = "", timeout_s: float = 30.0) -> tuple[int, bytes]:
        """What `/readyz` says."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", path or self.path)
            answer = connection.getresponse()
            return answer.status, answer.read()


def _torchscript(plan: Plan) -> Figure:
    model = make_large_model(plan.folder / "start-large", SMALL_MODEL_LAYERS)
    config = {"minWorkers": 1, "maxWorkers": 1}
    archive = make_archive(plan.folder / "start-torch", "torchscript", "large_torchscript.py", config, model)
    own: list[float] = []
    plain: list[float] = []
    for number in range(plan.rounds + 1):
        plan.say(f"start with torch: round {number} of {plan.rounds}" if number else "start with torch: warming up")
        with Marserve("marserve with a TorchScript model", archive, plan.new_folder("start")) as server:
            own.append(server.start_s)
        plain.append(_plain_load_s(model))
    within = Goal("at most", 1.0, "compared")
    return Figure("start to first answer, TorchScript model", "s", own[1:], "plain interpreter", plain[1:],
                  "difference", within, digits=2)  # fmt: skip


def make_large_model(folder: Path, layers: int) -> Path:
    """Write a TorchScript model of `layers` layers of 4 MiB; in a process of its own, which alone needs torch."""
    folder.mkdir(parents=True)
    path = folder / "large.pt"
    done = subprocess.run(
        [sys.executable, str(HANDLERS / "large_torchscript.py"), "make", str(path), str(layers)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotMeasure(f"the model of {layers} layers could not be made:\n{done.stderr.strip()}")
    return path


def _plain_load_s(model: Path) -> float:
    """Seconds until a plain interpreter has loaded the model and run it once."""
    began = time.monotonic()
    command = [sys.executable, str(HANDLERS / "large_torchscript.py"), "load", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.monotonic() - began
    if line != "ready\n":
        raise CannotMeasure(f"a plain interpreter did not load the model; it ended with status {process.returncode}")
    return took
