"""Observing: what it costs to see everything, and each part of that alone.

An echo model with batches of up to 16 at 64 connections, on servers that take turns in short pieces:

    off        no metrics, no access log, no recorder, no traces; no settings do that, `beside/silent_marserve.py` does
    metrics, access log, recorder, traces    one of them alone; of traces 1 %, sent to a collector that throws them away
    all        all of them, as a server has them with `tracing=otlp` and `trace_sample=0.01`

Compared with "off" in each piece are the rate and the CPU time that a request takes of the server's own process, which
noise moves less. The recorder and traces give most requests less the more there are in a second, so that their share
depends on the rate.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack

from figures import Figure, Goal
from load_generator import CannotMeasure, Load
from plan import Plan
from servers import BESIDE, Marserve, make_archive, one_piece
from turns import in_turns

LEAST_RATE = 0.85  # of all, beside none of it
MOST_OF_RECORDER = 1.02
PIECES = 6  # of a round
NO_RECORDER = {"flight_recorder_size": "0"}
TRACES = {"tracing": "otlp", "trace_sample": "0.01"}
# What is switched off by `silent_marserve.py`, and the settings.
SERVERS = {
    "off": (["log", "metrics"], NO_RECORDER),
    "metrics": (["log"], NO_RECORDER),
    "access log": (["metrics"], NO_RECORDER),
    "recorder": (["log", "metrics"], {}),
    "traces": (["log", "metrics"], {**NO_RECORDER, **TRACES}),
    "all": ([], TRACES),
}


def measure(plan: Plan) -> list[Figure]:
    """The figures of observing."""
    seconds = 0.3 if plan.is_quick else 0.5
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 16, "maxBatchDelay": 5}
    archive = make_archive(plan.folder / "observing", "echo", "echo.py", config)
    rates: dict[str, list[float]] = defaultdict(list)
    cpu_us: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        collector = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{_collect(stack)}"}
        servers: dict[str, Marserve] = {}
        for name, (silenced, settings) in SERVERS.items():
            folder, program = plan.new_folder("observing"), [str(BESIDE / "silent_marserve.py"), *silenced]
            servers[name] = stack.enter_context(
                Marserve(name, archive, folder, settings=settings, program=program, environment=collector)
            )
        for server in servers.values():
            plan.generator.run(server.port, server.path, body_bytes=64, connections=64, seconds=1.0)
            server.settle()

        def run(name: str) -> tuple[Load, float]:
            before_s = servers[name].own_cpu_s()
            load = one_piece(
                plan.generator, servers[name], body_bytes=64, connections=64, seconds=seconds, warm_up_s=0.1
            )
            return load, servers[name].own_cpu_s() - before_s

        for number in range(plan.rounds):
            plan.say(f"observing: round {number + 1} of {plan.rounds}")
            for name, seen in in_turns(list(servers), number, PIECES, run).items():
                rates[name] += [load.per_second for load, _ in seen]
                cpu_us[name] += [cpu_s * 1e6 / load.answered_in_all for load, cpu_s in seen]
    return [
        figure
        for name in SERVERS
        if name != "off"
        for figure in _rows(name, (rates[name], rates["off"]), (cpu_us[name], cpu_us["off"]))
    ]


def _rows(name: str, rates: tuple[list[float], list[float]], cpu_us: tuple[list[float], list[float]]) -> list[Figure]:
    words, least, most = f"{name} alone", None, None
    if name == "all":
        words, least = "all on", Goal("at least", LEAST_RATE, "compared")
    if name == "recorder":
        most = Goal("at most", MOST_OF_RECORDER, "compared")
    beside = "all off"
    return [
        Figure(f"{words}, 64 connections", "/s", rates[0], beside, rates[1], goal=least),
        Figure(f"{words}, CPU time a request", "µs", cpu_us[0], beside, cpu_us[1], goal=most, digits=2),
    ]


def _collect(stack: ExitStack) -> int:
    """Start a collector; its port. Raises CannotMeasure."""
    command = [sys.executable, str(BESIDE / "collector.py")]
    collector = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    stack.callback(collector.kill)
    assert collector.stdout is not None
    port = collector.stdout.readline().strip()
    if not port:
        raise CannotMeasure("observing: the collector did not start")
    return int(port)
