"""Steps: what continuous batching costs when a step of the model costs nothing.

One client asks for a stream of many pieces of 16 bytes. Measured is the time a piece takes where each is a step of its
own (the server sends the worker the running requests again), beside an ordinary stream of the same length, whose
handler sends all pieces within one call. The difference is the way to the server and back that each step pays.
"""

from __future__ import annotations

import contextlib
import http.client
import time

from figures import Figure
from load_generator import CannotMeasure
from plan import Plan
from servers import Marserve, Sample, make_archive

PIECE_BYTES = 16


def measure(plan: Plan) -> list[Figure]:
    """The figure of a step."""
    pieces = 500 if plan.is_quick else 5000
    took_ms: dict[str, list[float]] = {"steps": [], "pieces": []}
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in took_ms:
            config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 8, "continuousBatching": name == "steps"}
            archive = make_archive(plan.folder / f"countdown-{name}", "countdown", "countdown.py", config)
            servers[name] = stack.enter_context(
                Marserve(f"marserve, {name}", archive, plan.new_folder(name), sample=Sample(b"2"))
            )
        for number in range(plan.rounds):
            plan.say(f"steps: round {number + 1} of {plan.rounds}")
            for name, server in servers.items():
                _stream(server, pieces // 10)
                took_ms[name].append(_stream(server, pieces) * 1e3 / pieces)
                server.forget_output()
    return [
        Figure("a step of continuous batching, one request", "ms", took_ms["steps"], "a piece of an ordinary stream",
               took_ms["pieces"], "difference", digits=3),
    ]  # fmt: skip


def _stream(server: Marserve, pieces: int) -> float:
    """Seconds until a stream of so many pieces was read to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    with contextlib.closing(connection):
        began = time.perf_counter()
        connection.request("POST", server.path, body=str(pieces))
        answer = connection.getresponse()
        body = answer.read()
        took_s = time.perf_counter() - began
    if answer.status != 200 or len(body) != pieces * PIECE_BYTES:
        raise CannotMeasure(f"{server.name} answered {answer.status} with {len(body)} bytes to {pieces} pieces")
    return took_s
