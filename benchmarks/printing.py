"""Printing: what a model's clients notice while a worker of another model prints without end.

Measured: an echo model at 100 requests a second at random (an open loop). The median and the 99th percentile of the
time to answer, while the other model's worker prints lines of two bytes as fast as it can; while it uses as much CPU
time and prints nothing; and while it rests. The three are measured in turns, in pieces of seconds.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict

from figures import Figure, Goal
from load_generator import CannotMeasure
from open_loop import poisson, send
from plan import Plan
from servers import Marserve, make_archive

RATE = 100
MOST_WORSE = 1.2
PIECES = 3


def measure(plan: Plan) -> list[Figure]:
    """The figures of printing: how much longer answers take than beside a silent worker, and beside none."""
    seconds = 1.5 if plan.is_quick else 4.0
    store = plan.folder / "printing"
    archive = make_archive(store, "quiet", "echo.py", {"minWorkers": 1, "maxWorkers": 1})
    make_archive(store, "printing", "printing.py", {"minWorkers": 1, "maxWorkers": 1, "responseTimeout": 120})
    spans: dict[tuple[str, float], list[float]] = defaultdict(list)
    with Marserve("marserve", archive, plan.new_folder("printing"), settings={"load_models": "all"}) as server:
        for number in range(plan.rounds):
            plan.say(f"printing: round {number + 1} of {plan.rounds}")
            seen: dict[str, list[float]] = defaultdict(list)
            for piece in range(1 if plan.is_quick else PIECES):
                dues = poisson(RATE, seconds, number * PIECES + piece)
                cpu_s = 0.0
                for kind in ("flood", "silent", "none"):  # how much the silent one is to use is seen in the flood
                    other = _Other(server, kind, seconds + 0.5, cpu_s)
                    sent = send(server.port, server.path, dues, [b"x" * 64] * len(dues))
                    cpu_s = other.end() if kind == "flood" else other.end() and cpu_s
                    if sent.refused:
                        raise CannotMeasure(f"printing: {sent.refused} requests were refused")
                    seen[kind] += [latency for _, latency in sent.latencies]
                    server.settle()
                    server.forget_output()
            for kind, latencies in seen.items():
                latencies.sort()
                for share in (0.5, 0.99):
                    spans[kind, share].append(latencies[int(share * len(latencies))] * 1000)
    figures = []
    for share, name in ((0.5, "median"), (0.99, "99th percentile")):
        own = spans["flood", share]
        silent, none = spans["silent", share], spans["none", share]
        goal = Goal("at most", MOST_WORSE, "compared")
        title = f"{name} while another model's worker prints without end"
        figures += [
            Figure(title, "ms", own, "the same while it computes as much in silence", silent, goal=goal, digits=2),
            Figure(title, "ms", own, "the same while it rests", none, digits=2),
        ]
    return figures


class _Other:
    """One request to the other model, on a thread."""

    def __init__(self, server: Marserve, kind: str, seconds: float, cpu_s: float) -> None:
        order = {"seconds": seconds} | ({"cpu_s": cpu_s} if kind == "silent" else {})
        self._server, self._order = server, json.dumps(order).encode()
        self._answer: tuple[int, bytes] = 200, b"0"
        self._thread = threading.Thread(target=self._ask)
        if kind != "none":
            self._thread.start()

    def _ask(self) -> None:
        self._answer = self._server.ask(self._order, path="/predictions/printing", timeout_s=120)

    def end(self) -> float:
        """Wait for its answer: the CPU seconds that it used. Raises CannotMeasure."""
        if self._thread.ident is not None:
            self._thread.join()
        status, body = self._answer
        if status != 200:
            raise CannotMeasure(f"printing: the other model answered {status}: {body[:200]!r}")
        return float(body)
