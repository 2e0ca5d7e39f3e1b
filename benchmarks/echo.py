"""Echo: what the server costs when the model costs nothing.

Measured: marserve with an echo handler in one worker process, metrics and access log on, beside a bare ASGI application
that echoes in the HTTP server's own process (uvicorn with uvloop and httptools, no access log). The bare application
is the limit of the HTTP layer alone; marserve does all of a model server's work on top: queue, batches, another
process and back. All servers stay up and take turns, in another order each round.

    64 bytes, 64 connections    requests a second, as a ratio: above 1.00 x marserve answers more than the bare
                                application. With batches of up to 16, and with a batch size of 1. `peers.py` has
                                more beside it.
    64 bytes, one connection    the median time of a lone request, as a difference: what marserve adds to it. The
                                handler gets a lone request at once, whatever the batch size.
    1 MB, 64 connections        how large bodies fare.

Read the ratios, never the rates: load generator, server and worker share the cores of one machine.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack

from figures import Figure, Goal
from load_generator import Load
from plan import Plan
from servers import BareAsgi, Marserve, Server, make_archive, one_piece
from turns import in_turns, p50_ms, rate

SMALL, LARGE = 64, 1_000_000
MANY = 64
BATCH, DELAY_MS = 16, 5
PIECES = 4  # of a round


def measure(plan: Plan) -> list[Figure]:
    """The echo figures."""
    seconds = 0.3 if plan.is_quick else 0.6
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        servers: dict[str, Server] = {"bare": stack.enter_context(BareAsgi(plan.new_folder("bare")))}
        for name, batch in (("batched", BATCH), ("single", 1)):
            config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": batch, "maxBatchDelay": DELAY_MS}
            archive = make_archive(plan.folder / f"echo-{name}", "echo", "echo.py", config)
            servers[name] = stack.enter_context(
                Marserve(f"marserve, batch size {batch}", archive, plan.new_folder(name))
            )
        for server in servers.values():
            plan.generator.run(server.port, server.path, body_bytes=SMALL, connections=16, seconds=1.0)
        for number in range(plan.rounds):
            plan.say(f"echo: round {number + 1} of {plan.rounds}")
            for body_bytes, connections in ((SMALL, MANY), (SMALL, 1), (LARGE, MANY)):

                def run(name: str, body_bytes: int = body_bytes, connections: int = connections) -> Load:
                    return one_piece(
                        plan.generator, servers[name], body_bytes=body_bytes, connections=connections, seconds=seconds,
                        warm_up_s=0.1,
                    )  # fmt: skip

                for name, loads in in_turns(list(servers), number, PIECES, run).items():
                    if connections == 1:
                        alone[name].append(p50_ms(loads))
                    else:
                        rates[name, body_bytes].append(rate(loads))
    bare = "bare ASGI"
    faster = Goal("at least", 1.3, "compared")
    near = Goal("at most", 0.05, "compared")
    large = Goal("at least", 0.45, "compared")
    return [
        Figure("echo 64 B, batches of up to 16, 64 connections", "/s", rates["batched", SMALL], bare,
               rates["bare", SMALL], goal=faster),
        Figure("echo 64 B, batch size 1, 64 connections", "/s", rates["single", SMALL], bare, rates["bare", SMALL]),
        Figure("echo 64 B, batches of up to 16, 1 connection, p50", "ms", alone["batched"], bare, alone["bare"],
               "difference", near, digits=3),
        Figure("echo 64 B, batch size 1, 1 connection, p50", "ms", alone["single"], bare, alone["bare"],
               "difference", digits=3),
        Figure("echo 1 MB, batches of up to 16, 64 connections", "/s", rates["batched", LARGE], bare,
               rates["bare", LARGE], goal=large),
        Figure("echo 1 MB, batch size 1, 64 connections", "/s", rates["single", LARGE], bare, rates["bare", LARGE],
               goal=large),
    ]  # fmt: skip
