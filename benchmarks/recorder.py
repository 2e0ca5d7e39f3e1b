"""Recorder: what it costs to keep the timeline of every request.

Measured: an echo model with batches of up to 16 at 64 connections, on two servers that take turns: one as marserve has
it, one with `flight_recorder_size=0`, which makes no timelines. Compared are the CPU time that a request takes of all
of a server's processes, which noise moves least, and the rate.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack

from figures import Figure, Goal
from load_generator import Load
from plan import Plan
from servers import Marserve, Server, make_archive, one_piece
from turns import in_turns, rate

MOST_WORSE = 1.02
PIECES = 6  # of a round
SETTINGS = {"on": {}, "off": {"flight_recorder_size": "0"}}


def measure(plan: Plan) -> list[Figure]:
    """The figures of the recorder."""
    seconds = 0.4 if plan.is_quick else 1.0
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 16, "maxBatchDelay": 5}
    archive = make_archive(plan.folder / "recorder", "echo", "echo.py", config)
    rates: dict[str, list[float]] = defaultdict(list)
    cpu_ms: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, settings in SETTINGS.items():
            folder = plan.new_folder(f"recorder-{name}")
            servers[name] = stack.enter_context(Marserve(f"recorder {name}", archive, folder, settings=settings))
        for server in servers.values():
            plan.generator.run(server.port, server.path, body_bytes=64, connections=64, seconds=1.0)

        def run(name: str) -> tuple[Load, float]:
            before = servers[name].cpu_s()
            load = one_piece(plan.generator, servers[name], body_bytes=64, connections=64, seconds=seconds)
            return load, servers[name].cpu_s() - before

        for number in range(plan.rounds):
            plan.say(f"recorder: round {number + 1} of {plan.rounds}")
            for name, seen in in_turns(list(servers), number, PIECES, run).items():
                rates[name].append(rate([load for load, _ in seen]))
                used_s = sum(cpu_s for _, cpu_s in seen)
                cpu_ms[name].append(used_s * 1e3 / sum(load.answered_in_all for load, _ in seen))
    goal = Goal("at most", MOST_WORSE, "compared")
    return [
        Figure("with the recorder, CPU time a request", "ms", cpu_ms["on"], "without", cpu_ms["off"], goal=goal,
               digits=4),
        Figure("with the recorder, 64 connections", "/s", rates["on"], "without", rates["off"]),
    ]  # fmt: skip
