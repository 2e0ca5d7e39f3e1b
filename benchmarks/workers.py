"""Workers: does a second one double what a model does, and do two models get the same?

Measured with a handler that takes 11 ms a request, by sleeping, so that the cores are free and what is measured is the
server's sharing out:

    one and two workers of one model      requests a second, 32 connections
    two models of one server, side by side, one worker and 32 connections each: the slower beside the faster

The same once more with two models that echo as fast as they can. These compete for the server's process and the cores,
so that whoever the server preferred would show.
"""

from __future__ import annotations

from contextlib import ExitStack

from figures import Figure, Goal
from load_generator import CannotMeasure, Load
from plan import Plan
from servers import Marserve, make_archive
from turns import turn

BODY_BYTES = 64
CONNECTIONS = 32
TWICE, FAIR = 1.9, 0.9
KINDS = {"sleeping": "known_cost.py", "echoing": "echo.py"}


def measure(plan: Plan) -> list[Figure]:
    """The figures of workers."""
    seconds = 1.0 if plan.is_quick else 3.0
    rates: dict[int, list[float]] = {1: [], 2: []}
    slower: dict[str, list[float]] = {kind: [] for kind in KINDS}
    faster: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        of_workers = {}
        for count in rates:
            config = {"minWorkers": count, "maxWorkers": count, "batchSize": 1}
            archive = make_archive(plan.folder / f"workers-{count}", "sleeping", KINDS["sleeping"], config)
            server = stack.enter_context(Marserve(f"marserve, {count} workers", archive, plan.new_folder("workers")))
            server.wait_for_workers(count)
            of_workers[count] = server
        of_two = {kind: stack.enter_context(_serve_two(plan, kind)) for kind in KINDS}
        for number in range(plan.rounds):
            plan.say(f"workers: round {number + 1} of {plan.rounds}")
            for count in turn(list(rates), number):
                server = of_workers[count]
                load = plan.generator.run(
                    server.port, server.path, body_bytes=BODY_BYTES, connections=CONNECTIONS, seconds=seconds
                )
                rates[count].append(load.must_be_clean(server.name).per_second)
            for kind, server in of_two.items():
                pair = sorted(load.per_second for load in _side_by_side(plan, server, kind, seconds))
                slower[kind].append(pair[0])
                faster[kind].append(pair[1])
                server.settle()
                server.forget_output()
    return [
        Figure("sleeping handler, two workers", "/s", rates[2], "one worker", rates[1],
               goal=Goal("at least", TWICE, "compared")),
        *(Figure(f"two {kind} models side by side, the slower", "/s", slower[kind], "the faster", faster[kind],
                 goal=Goal("at least", FAIR, "compared")) for kind in KINDS),
    ]  # fmt: skip


def _serve_two(plan: Plan, kind: str) -> Marserve:
    """A server of two models alike, `first` and `second`."""
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1}
    archive = make_archive(plan.folder / f"workers-two-{kind}", "first", KINDS[kind], config)
    server = Marserve(f"marserve, two {kind} models", archive, plan.new_folder("workers"))
    status, body = server.manage("POST", "/models?url=first.mar&model_name=second&initial_workers=1&synchronous=true")
    if status != 200:
        server.stop()
        raise CannotMeasure(f"workers: the second model was answered {status}: {body[:300]!r}")
    return server


def _side_by_side(plan: Plan, server: Marserve, kind: str, seconds: float) -> list[Load]:
    """What each of the two got while both were asked."""
    loads = [
        plan.generator.start(
            server.port, f"/predictions/{name}", body_bytes=BODY_BYTES, connections=CONNECTIONS, seconds=seconds,
            warm_up_s=0.5,
        )
        for name in ("first", "second")
    ]  # fmt: skip
    return [plan.generator.result(load).must_be_clean(server.name) for load in loads]
