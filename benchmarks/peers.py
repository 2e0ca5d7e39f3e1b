"""Peers: a small echo, beside what people would pick instead and beside what limits anybody.

Measured with 64 bytes, the worker's handler giving them back; all servers stay up and take turns, in another order each
round:

    marserve     batches of up to 16 within 5 ms, and one by one; metrics and access log on. Once more with neither,
                 which shows what the two cost
    mosec        the fastest peer, batching alike and one by one, without an access log (it has none). Left out, and
                 said so, where it cannot be installed
    bare ASGI    uvicorn echoing in its own process: no worker, no log
    the bound    `beside/bound.py`: parser, queue, worker and back, with the bookkeeping and nothing else

At 64 connections rates are compared, and the CPU time a request takes of all of a server's processes, the steadiest
figure of all. At 1 and 8 connections with batching on nobody has 16 requests at a time: marserve gives a worker that is
idle what there is, mosec waits for its delay.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack

from figures import Figure, Goal
from load_generator import Load
from mosec_peer import NAME, Mosec, install_mosec
from plan import Plan
from servers import BESIDE, BareAsgi, Bound, Marserve, Server, make_archive, one_piece
from turns import in_turns, p50_ms, rate

BODY_BYTES = 64
BATCH, DELAY_MS = 16, 5
PIECES = 4  # of a round
MANY, FEW = 64, (1, 8)
WITH_BATCHES = ("batched", "bare", "mosec")  # who is asked by few connections as well


def measure(plan: Plan) -> list[Figure]:
    """The figures beside peers."""
    seconds = 0.3 if plan.is_quick else 0.6
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    cpu_ms: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        servers = _start(plan, stack)
        for server in servers.values():
            plan.generator.run(server.port, server.path, body_bytes=BODY_BYTES, connections=16, seconds=1.0)
            server.settle()
        for number in range(plan.rounds):
            plan.say(f"peers: round {number + 1} of {plan.rounds}")
            for connections in (MANY, *FEW):

                def run(name: str, connections: int = connections) -> tuple[Load, float]:
                    server = servers[name]
                    before_s = server.cpu_s()
                    load = one_piece(
                        plan.generator, server, body_bytes=BODY_BYTES, connections=connections, seconds=seconds,
                        warm_up_s=0.1,
                    )  # fmt: skip
                    return load, server.cpu_s() - before_s

                asked = [name for name in servers if connections == MANY or name in WITH_BATCHES]
                for name, seen in in_turns(asked, number, PIECES, run).items():
                    loads = [load for load, _ in seen]
                    rates[name, connections].append(rate(loads))
                    if connections == MANY:
                        used_s = sum(cpu_s for _, cpu_s in seen)
                        cpu_ms[name].append(used_s * 1e3 / sum(load.answered_in_all for load in loads))
                    if connections == 1:
                        alone[name].append(p50_ms(loads))
    return _figures(rates, alone, cpu_ms)


def _start(plan: Plan, stack: ExitStack) -> dict[str, Server]:
    servers: dict[str, Server] = {}
    for name, batch in (("batched", BATCH), ("single", 1), ("silent", BATCH)):
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": batch, "maxBatchDelay": DELAY_MS}
        archive = make_archive(plan.folder / f"peers-{name}", "echo", "echo.py", config)
        program = [str(BESIDE / "silent_marserve.py"), "log", "metrics"] if name == "silent" else ["-m", "marserve.cli"]
        server = Marserve(f"marserve, {name}", archive, plan.new_folder("peers"), program=program)
        servers[name] = stack.enter_context(server)
    servers["bare"] = stack.enter_context(BareAsgi(plan.new_folder("bare")))
    servers["bound"] = stack.enter_context(Bound("the bound", BATCH, plan.new_folder("bound")))
    servers["bound single"] = stack.enter_context(Bound("the bound, one by one", 1, plan.new_folder("bound")))
    python = install_mosec(plan)
    if python is not None:
        for name, batch in (("mosec", BATCH), ("mosec single", 1)):
            peer = Mosec(python, plan.new_folder("mosec"), batch=batch, delay_ms=DELAY_MS)
            servers[name] = stack.enter_context(peer)
    return servers


def _figures(
    rates: dict[tuple[str, int], list[float]], alone: dict[str, list[float]], cpu_ms: dict[str, list[float]]
) -> list[Figure]:
    bare, bound = "bare ASGI", "the bound"
    batched, single = "64 B, batches of up to 16", "64 B, one by one"

    def row(name: str, own: str, beside: str, other: str, bound: float | None, connections: int = MANY) -> Figure:
        goal = None if bound is None else Goal("at least", bound, "compared")
        many = f"{name}, {connections} connection{'' if connections == 1 else 's'}"
        return Figure(many, "/s", rates[own, connections], beside, rates[other, connections], goal=goal)

    figures = [
        row(batched, "batched", bare, "bare", 1.3),
        row(batched, "batched", bound, "bound", None),
        row(single, "single", bare, "bare", None),
        row(single, "single", bound, "bound single", None),
        Figure(f"{batched}, 1 connection, p50", "ms", alone["batched"], bare, alone["bare"], "difference",
               Goal("at most", 0.05, "compared"), digits=3),
        Figure(f"{batched}, neither metrics nor access log", "/s", rates["silent", MANY], "with both",
               rates["batched", MANY], goal=Goal("at most", 1.2, "compared")),
        Figure(f"{batched}, CPU time a request", "ms", cpu_ms["batched"], bare, cpu_ms["bare"], digits=4),
        Figure(f"{batched}, CPU time a request", "ms", cpu_ms["batched"], bound, cpu_ms["bound"], digits=4),
        Figure(f"{single}, CPU time a request", "ms", cpu_ms["single"], bound, cpu_ms["bound single"], digits=4),
        Figure(f"{batched}, CPU time, neither metrics nor access log", "ms", cpu_ms["silent"], "with both",
               cpu_ms["batched"], digits=4),
    ]  # fmt: skip
    if ("mosec", MANY) in rates:
        figures += [
            row(batched, "batched", NAME, "mosec", 1.1),
            row(single, "single", f"{NAME}, one by one", "mosec single", 1.2),
            *(row(batched, "batched", NAME, "mosec", 20.0, connections) for connections in FEW),
            Figure(f"{batched}, CPU time a request", "ms", cpu_ms["batched"], NAME, cpu_ms["mosec"], digits=4),
            Figure(f"{single}, CPU time a request", "ms", cpu_ms["single"], f"{NAME}, one by one",
                   cpu_ms["mosec single"], digits=4),
        ]  # fmt: skip
    return figures
