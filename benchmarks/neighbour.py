"""Neighbours: what a model's clients notice while another model is loaded.

Measured: a model whose handler takes 11 ms a request, by sleeping, at 30 % of what its one worker can do, requests at
random (an open loop). The 99th percentile of the time to answer, first quiet, then while another model is registered
and removed again and again: an archive of 100 MB is unpacked and checked, and its handler computes for a second.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
from collections.abc import Iterator

from figures import Figure, Goal
from load_generator import CannotMeasure
from open_loop import poisson, send
from plan import Plan
from servers import Marserve, make_archive

RATE = 27
ARCHIVE_BYTES = 100_000_000
MOST_WORSE = 1.5


def measure(plan: Plan) -> list[Figure]:
    """The figure of neighbours."""
    seconds = 3.0 if plan.is_quick else 10.0
    store = plan.folder / "neighbours"
    config = {"minWorkers": 1, "maxWorkers": 1}
    archive = make_archive(store, "known", "known_cost.py", config)
    weights = plan.folder / "weights.dat"
    weights.write_bytes(os.urandom(ARCHIVE_BYTES))
    make_archive(store, "busy", "busy_start.py", config, weights)
    weights.unlink()
    spans: dict[bool, list[float]] = {False: [], True: []}
    with Marserve("marserve", archive, plan.new_folder("neighbours")) as server:
        for number in range(plan.rounds):
            plan.say(f"neighbour: round {number + 1} of {plan.rounds}")
            for is_loading in (False, True) if number % 2 else (True, False):
                dues = poisson(RATE, seconds, number)
                with _loading(server.management_port) if is_loading else contextlib.nullcontext():
                    sent = send(server.port, server.path, dues, [b"x"] * len(dues))
                spans[is_loading].append(sent.percentile(0.99) * 1000)
    name = "99th percentile while another model is loaded"
    goal = Goal("at most", MOST_WORSE, "compared")
    return [Figure(name, "ms", spans[True], "the same when nothing is", spans[False], goal=goal, digits=1)]


@contextlib.contextmanager
def _loading(port: int) -> Iterator[None]:
    """Have a model loaded and removed again and again meanwhile. Raises CannotMeasure if that failed or never ended."""
    is_over, seen = threading.Event(), list[int]()

    def load() -> None:
        while not is_over.is_set():
            for method, target in (("POST", "/models?url=busy.mar&initial_workers=1"), ("DELETE", "/models/busy")):
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                    connection.request(method, target)
                    response = connection.getresponse()
                    response.read()
                    seen.append(response.status)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if not seen or set(seen) != {200}:
        raise CannotMeasure(f"neighbour: loading the other model was answered {sorted(set(seen))}")
