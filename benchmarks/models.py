"""Models: what is left of a real handler's speed when a server stands around it.

Measured with the three networks of `handlers/workload.py` (a small one on a PNG, ResNet-18's shape on a JPEG, a
transformer encoder on token ids in JSON), one worker, one torch thread, batches of up to 16 within 5 ms:

    64 connections   requests a second beside a plain loop that calls the same code with batches of 16 and encodes its
                     answers as marserve's worker does. No server with one worker can do much more than that
    one connection   the median time, beside that of a call with a batch of one in the loop: no batch delay is paid;
                     and beside a bound (`beside/bound.py`) with the same work in its worker, for what lies between
                     loop and bound is the machine's: to wake a process on another core, whose caches the network filled
    mosec            batching alike, on both

The loop runs in a process of its own in turn with the servers; the load generator and the server's process take what
they need of the same cores while it does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

from figures import Figure, Goal
from load_generator import CannotMeasure
from mosec_peer import NAME, Mosec, install_mosec
from plan import Plan
from servers import BESIDE, HANDLERS, Bound, Marserve, Sample, Server, make_archive
from turns import turn

# Name, body, its type, and for how long many connections ask: a window has to hold many batches, since it ends within
# one, and a batch of W2 takes half a second.
WORKS = {
    "cnn": ("W1, small CNN on a PNG", "cnn.png", "image/png", 2.0),
    "resnet": ("W2, ResNet-18 on a JPEG", "resnet.jpg", "image/jpeg", 8.0),
    "encoder": ("W3, encoder on token ids", "encoder.json", "application/json", 4.0),
}
ALONE_S, PIECES = 4.0, 8
BATCH, DELAY_MS = 16, 5
MANY = 64
OF_THE_LOOP, ADDED_MS = 0.93, 0.3


class PlainLoop:
    """The work in a plain loop, in a process of its own, which `program` is when it is given these words."""

    def __init__(self, program: Path, work: str, *words: object) -> None:
        command = [sys.executable, str(program), work, *map(str, words)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._read_line() != "ready\n":
            self.stop()
            raise CannotMeasure(f"the plain loop of {work} did not start; it said why above")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def run(self, batch: int, seconds: float, *words: object) -> tuple[float, float]:
        """Items a second and the median of a call in ms, with batches of this size; the program knows the `words`."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, (batch, seconds, *words))) + "\n")
        self._process.stdin.flush()
        seen = json.loads(self._read_line())
        return seen["per_second"], seen["p50_ms"]

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def measure(plan: Plan) -> list[Figure]:
    """The figures of models."""
    for package in ("torch", "PIL"):
        if find_spec(package) is None:
            raise CannotMeasure(f"models: {package} is not installed; install marserve's extra `torch` and Pillow")
    plan.say("models: making the networks")
    files = plan.new_folder("networks")
    files.mkdir()
    done = subprocess.run(
        [sys.executable, str(HANDLERS / "workload.py"), "make", str(files)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotMeasure(f"models: the networks could not be made:\n{done.stderr.strip()}")
    python = install_mosec(plan)
    figures = []
    for work in WORKS:
        figures += _measure_one(plan, work, files, python)
    return figures


def _measure_one(plan: Plan, work: str, files: Path, python: Path | None) -> list[Figure]:
    name, body_name, content_type, many_s = WORKS[work]
    body_file = files / body_name
    sample = Sample(body_file.read_bytes(), content_type)
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": BATCH, "maxBatchDelay": DELAY_MS, "work": work}
    archive = make_archive(
        plan.folder / f"models-{work}", work, "workload.py", config, files / f"{work}.pt", (str(body_file),)
    )
    rates: dict[str, list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        loop = stack.enter_context(PlainLoop(BESIDE / "plain_loop.py", work, files, body_file))
        servers: dict[str, Server] = {}
        servers["marserve"] = stack.enter_context(
            Marserve("marserve", archive, plan.new_folder("models"), settings={"worker_threads": "1"}, sample=sample)
        )
        servers["bound"] = stack.enter_context(
            Bound("the bound", BATCH, plan.new_folder("bound"), work=(work, files), sample=sample)
        )
        if python is not None:
            servers["mosec"] = stack.enter_context(
                Mosec(python, plan.new_folder("mosec"), work=work, files=files, batch=BATCH, delay_ms=DELAY_MS,
                      sample=sample)
            )  # fmt: skip
        answers = {who: json.loads(server.ask()[1]) for who, server in servers.items()}
        if not _are_alike(list(answers.values())):
            raise CannotMeasure(f"models: {work} is not answered alike: {answers}")
        for server in servers.values():
            plan.generator.run(server.port, server.path, body_file=body_file, content_type=content_type,
                               connections=MANY, seconds=1.0)  # fmt: skip
        for number in range(plan.rounds):
            plan.say(f"models: {name}, round {number + 1} of {plan.rounds}")
            for connections, seconds in ((MANY, many_s / 2 if plan.is_quick else many_s), (1, ALONE_S)):
                # Many at once in one piece, for a batch must fit in; one at a time in short ones that go round.
                pieces = 1 if connections == MANY else PIECES
                seen: dict[str, list[float]] = defaultdict(list)
                for piece in range(pieces):
                    for who in turn(["loop", *servers], number + piece):
                        if who == "loop":
                            per_second, p50_ms = loop.run(BATCH if connections == MANY else 1, seconds / 2 / pieces)
                        else:
                            server = servers[who]
                            load = plan.generator.run(
                                server.port, server.path, body_file=body_file, content_type=content_type,
                                connections=connections, seconds=seconds / pieces,
                            ).must_be_clean(server.name)  # fmt: skip
                            per_second, p50_ms = load.per_second, load.p50_ms
                            server.settle()
                            server.forget_output()
                        seen[who].append(per_second if connections == MANY else p50_ms)
                for who, values in seen.items():
                    (rates if connections == MANY else alone)[who].append(median(values))
    beside = f"plain loop, batches of {BATCH}"
    figures = [
        Figure(f"{name}, {MANY} connections", "/s", rates["marserve"], beside, rates["loop"],
               goal=Goal("at least", OF_THE_LOOP, "compared")),
        Figure(f"{name}, 1 connection, p50", "ms", alone["marserve"], "plain loop, batch of 1", alone["loop"],
               "difference", Goal("at most", ADDED_MS, "compared"), digits=3),
        Figure(f"{name}, 1 connection, p50", "ms", alone["marserve"], "the bound", alone["bound"], "difference",
               digits=3),
        Figure(f"{name}, 1 connection, p50, the bound", "ms", alone["bound"], "plain loop, batch of 1", alone["loop"],
               "difference", digits=3),
    ]  # fmt: skip
    if "mosec" in servers:
        figures += [
            Figure(f"{name}, {MANY} connections", "/s", rates["marserve"], NAME, rates["mosec"],
                   goal=Goal("at least", 1.0, "compared")),
            Figure(f"{name}, 1 connection, p50", "ms", alone["marserve"], NAME, alone["mosec"], "difference", digits=3),
        ]  # fmt: skip
    return figures


def _are_alike(answers: list[dict[str, list[float]]]) -> bool:
    first, *others = answers
    return all(
        abs(mine - theirs) < 1e-3
        for other in others
        for mine, theirs in zip(first["scores"], other["scores"], strict=True)
    )
