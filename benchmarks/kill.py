"""Kill: a worker is killed under load. How long until its replacement answers, and what is lost?

Measured on a model with one worker, so that nobody else can help out: load on 32 connections, and beside it one client
that asks again and again which process answers. The worker is killed with SIGKILL; the figure is the time from there
to the first answer of another process. What the worker had taken is run again by its replacement, so no request may
fail or be lost, of any connection.

The model's handler imports torch where it is installed, as nearly every real one does (numpy where it is not). Forked
workers (`workerStart: auto`) come from a template that has done so already; beside it, in turns, `workerStart: fresh`,
where the replacement is a new interpreter that imports it again.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
from importlib.util import find_spec

from figures import Figure, Goal
from load_generator import CannotMeasure, Load
from plan import Plan
from servers import Marserve, make_archive

CONNECTIONS = 32
BODY_BYTES = 64
BEFORE_S = 0.5  # of load before the kill
LIMIT_S = 60.0


def measure(plan: Plan) -> list[Figure]:
    """The figures of a kill."""
    imports = ["torch" if find_spec("torch") is not None else "numpy"]
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 8, "maxBatchDelay": 5, "imports": imports}
    until: dict[str, list[float]] = {"auto": [], "fresh": []}
    broken: dict[str, list[float]] = {"auto": [], "fresh": []}
    with contextlib.ExitStack() as stack:
        servers = {}
        for start in until:
            archive = make_archive(
                plan.folder / f"kill-{start}", "worker_pid", "worker_pid.py", {**config, "workerStart": start}
            )
            servers[start] = stack.enter_context(Marserve(f"marserve, {start}", archive, plan.new_folder("kill")))
        for number in range(plan.rounds):
            plan.say(f"kill: round {number + 1} of {plan.rounds}")
            for start, server in servers.items():
                took_s, load = _kill_under_load(plan, server, BEFORE_S + (1.5 if start == "auto" else 4.0))
                until[start].append(took_s * 1e3)
                broken[start].append(load.failed + load.lost)
                server.forget_output()
    beside = f"fresh interpreter that imports {imports[0]}"
    return [
        Figure("worker killed under load, until its replacement answers", "ms", until["auto"], beside, until["fresh"],
               goal=Goal("at most", 200.0, "own")),
        Figure("worker killed under load, requests failed or lost (sum)", "", [sum(broken["auto"])], beside,
               [sum(broken["fresh"])], "difference", Goal("at most", 0.0, "own")),
    ]  # fmt: skip


def _kill_under_load(plan: Plan, server: Marserve, seconds: float) -> tuple[float, Load]:
    """Kill the one worker: seconds until another process answered, and how the load fared."""
    load = plan.generator.start(
        server.port, server.path, body_bytes=BODY_BYTES, connections=CONNECTIONS, seconds=seconds, warm_up_s=0.2
    )
    try:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
        with contextlib.closing(client):
            time.sleep(BEFORE_S)
            victim = _who(client, server)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            while _who(client, server) == victim:
                if time.monotonic() - killed > LIMIT_S:
                    raise CannotMeasure(f"process {victim} of {server.name} answers though it was killed")
            took_s = time.monotonic() - killed
    finally:
        result = plan.generator.result(load)
    return took_s, result


def _who(client: http.client.HTTPConnection, server: Marserve) -> int:
    """The process id of the worker that answers. Raises CannotMeasure when nobody does."""
    client.request("POST", server.path, b"who?", {"Content-Type": "application/octet-stream"})
    answer = client.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise CannotMeasure(f"{server.name} answered {answer.status} around a kill: {body[:200]!r}")
    return int(body)
