"""Ray pool: what a pool on two nodes of a Ray cluster does beside one on this machine, and how soon a loss is noticed.

Both pools have two workers with the echo handler, batches of up to 16. The nodes are real ones of Ray (a raylet each),
both on this machine, so every byte goes through TCP and TLS, and what they do for it is taken from the same cores:

    64 bytes, 64 connections    requests a second, as a ratio to the local pool's
    worker killed               from SIGKILL until the server has booked its death, as describe says it
    node lost                   from the end of all its processes; and from a stop, when nothing is closed

"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from figures import Figure, Goal
from load_generator import CannotMeasure, Load
from plan import Plan
from servers import BESIDE, Marserve, make_archive, one_piece
from turns import in_turns, rate

BODY_BYTES, CONNECTIONS, BATCH, DELAY_MS = 64, 64, 16, 5
WORKERS = 2
PIECES = 4
LIMIT_S = 60.0


class Nodes:
    """A Ray cluster on this machine; `beside/ray_nodes.py` says how it is told what to do."""

    def __init__(self, folder: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        self._process = subprocess.Popen(
            [sys.executable, str(BESIDE / "ray_nodes.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**environment, "RAY_TMPDIR": str(folder)},
        )
        self.address: str = self._read()["address"]

    def ask(self, line: str) -> dict[str, Any]:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End all of it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_S)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                document: dict[str, Any] = json.loads(line)
                return document
        raise CannotMeasure(f"the Ray cluster has ended with status {self._process.wait()}")


@contextlib.contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """A cluster without nodes yet. Ray makes sockets in its folder, so that its path must be a short one."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder, contextlib.closing(Nodes(Path(folder))) as made:
        yield made


def measure(plan: Plan) -> list[Figure]:
    """The figures of a pool on a cluster. Raises CannotMeasure."""
    if find_spec("ray") is None:
        raise CannotMeasure("Ray is not installed (extra `ray`)")
    seconds = 0.3 if plan.is_quick else 0.6
    rates: dict[str, list[float]] = defaultdict(list)
    worker_ms: list[float] = []
    closed_ms: list[float] = []
    silent_ms: list[float] = []
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(ray_nodes())
        for _ in range(2):
            nodes.ask("add 2")
        servers = {name: stack.enter_context(_serve(plan, name, nodes)) for name in ("local", "ray")}
        for number in range(plan.rounds):
            plan.say(f"ray_pool: round {number + 1} of {plan.rounds}")

            def run(name: str) -> Load:
                return one_piece(
                    plan.generator, servers[name], body_bytes=BODY_BYTES, connections=CONNECTIONS, seconds=seconds,
                    warm_up_s=0.1,
                )  # fmt: skip

            for name, loads in in_turns(list(servers), number, PIECES, run).items():
                rates[name].append(rate(loads))
        server = servers["ray"]
        for number in range(plan.rounds):
            plan.say(f"ray_pool: loss {number + 1} of {plan.rounds}")
            worker_ms.append(_lose(server, lambda worker: os.kill(worker["pid"], signal.SIGKILL)) * 1e3)
            silent_ms.append(_lose(server, _stop_agent) * 1e3)
            nodes.ask("add 2")
            closed_ms.append(_lose(server, lambda worker: _end_node(nodes, worker)) * 1e3)
    return [
        Figure("Ray pool of two nodes, 64 B, 64 connections, batches of 16", "/s", rates["ray"], "local pool",
               rates["local"], goal=Goal("at least", 0.7, "compared")),
        Figure("remote worker killed, until the server knows", "ms", worker_ms, goal=Goal("at most", 100.0, "own")),
        Figure("node lost, connections closed, until the server knows", "ms", closed_ms,
               goal=Goal("at most", 3000.0, "own")),
        Figure("node lost, nothing closed, until the server knows", "ms", silent_ms,
               goal=Goal("at most", 3000.0, "own")),
    ]  # fmt: skip


def _serve(plan: Plan, name: str, nodes: Nodes) -> Marserve:
    config: dict[str, Any] = {"minWorkers": WORKERS, "maxWorkers": WORKERS, "launcher": name}
    config |= {"batchSize": BATCH, "maxBatchDelay": DELAY_MS}
    folder = plan.new_folder(f"ray-{name}")
    archive = make_archive(plan.folder / f"ray-pool-{name}", "echo", "echo.py", config)
    settings = {"ray_address": nodes.address, "ray_cache": str(plan.folder / "nodes")}
    server = Marserve(f"marserve, {name} pool", archive, folder, settings=settings)
    try:
        server.wait_for_workers(WORKERS)
    except BaseException:
        server.stop()
        raise
    return server


def _workers(server: Marserve) -> list[dict[str, Any]]:
    described = json.loads(server.manage("GET", "/models/echo")[1])
    workers: list[dict[str, Any]] = described[0]["workers"]
    return workers


def _lose(server: Marserve, lose: Any) -> float:
    """Lose what the first worker stands on: seconds until the server has booked its death. Waits for the next one."""
    server.wait_for_workers(WORKERS)
    worker = _workers(server)[0]
    before = worker.get("lastDeath", {}).get("at")
    at = time.time()
    lose(worker)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        now = next(each for each in _workers(server) if each["id"] == worker["id"])
        death = now.get("lastDeath", {}).get("at")
        if death not in (None, before):
            server.wait_for_workers(WORKERS)
            return datetime.fromisoformat(str(death)).timestamp() - at
        time.sleep(0.01)
    raise CannotMeasure(f"{server.name} has not noticed within {LIMIT_S:g} s that worker {worker['id']} is lost")


def _stop_agent(worker: dict[str, Any]) -> None:
    """Stop the agent above a worker, as a machine that hangs: nothing is closed."""
    for parent in psutil.Process(worker["pid"]).parents():
        if "ray::" in " ".join(parent.cmdline()):
            parent.suspend()
            return
    raise CannotMeasure(f"process {worker['pid']} has no agent above it")


def _end_node(nodes: Nodes, worker: dict[str, Any]) -> None:
    name = worker["node"].partition("(")[2].rstrip(")")
    nodes.ask(f"kill {name}")
