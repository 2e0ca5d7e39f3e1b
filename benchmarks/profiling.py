"""Profiling: what others' clients notice of a profile, and what a worker that is not profiled pays for it.

One server has two models. A profile of one is made under load, five seconds long; the other, whose handler sleeps 11 ms
a request, gets requests at random at 30 % of what its worker can do. Compared is the 99th percentile of the other's
times with those while the first model serves the same load without a profile.

Without a profile nothing of it is on a batch's way. Measured is a batch of one echo through `ServedModel.serve_batch`
in this process, beside the method as it was before there were profiles.
"""

from __future__ import annotations

import contextlib
import http.client
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from figures import Figure, Goal
from load_generator import CannotMeasure
from open_loop import poisson, send
from plan import Plan
from servers import Marserve, make_archive

from marserve.messages import Batch, Item, Load, pack_head
from marserve.shared_page import Page, create_page
from marserve.worker.connection import Connection
from marserve.worker.load import LoadedModel
from marserve.worker.process.printed_lines import running
from marserve.worker.serving import ServedModel
from marserve_handlers.context import Context
from marserve_handlers.metrics import MetricsCache

RATE = 27
MOST_WORSE = 1.1
MOST_OFF = 1.01
PIECES, BATCHES = 40, 500


def measure(plan: Plan) -> list[Figure]:
    """The figures of profiling."""
    return [_others(plan), _off(plan)]


def _others(plan: Plan) -> Figure:
    seconds = 3.0 if plan.is_quick else 6.0
    store = plan.folder / "profiling"
    config = {"minWorkers": 1, "maxWorkers": 1}
    archive = make_archive(store, "known", "known_cost.py", config)
    make_archive(store, "mixed", "profiled.py", config)
    spans: dict[bool, list[float]] = {False: [], True: []}
    with Marserve("marserve", archive, plan.new_folder("profiling")) as server:
        status, said = server.manage("POST", "/models?url=mixed.mar&initial_workers=1&synchronous=true")
        if status != 200:
            raise CannotMeasure(f"profiling: the model was not registered: {said.decode()[:200]}")
        with _asked(server.port):
            server.manage("POST", "/models/mixed/profile?seconds=1")  # the first imports what it needs
            for number in range(plan.rounds):
                plan.say(f"profiling: round {number + 1} of {plan.rounds}")
                for is_profiled in (False, True) if number % 2 else (True, False):
                    dues = poisson(RATE, seconds, number)
                    with _profiled(server, seconds - 1) if is_profiled else contextlib.nullcontext():
                        sent = send(server.port, server.path, dues, [b"x"] * len(dues))
                    spans[is_profiled].append(sent.percentile(0.99) * 1000)
    name = "99th percentile of another model during a profile"
    goal = Goal("at most", MOST_WORSE, "compared")
    return Figure(name, "ms", spans[True], "the same without", spans[False], goal=goal, digits=1)


@contextlib.contextmanager
def _asked(port: int) -> Iterator[None]:
    """Ask the model that is profiled, one request after the other. Raises CannotMeasure if one was not answered."""
    is_over, failed = threading.Event(), list[int]()

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        while not is_over.is_set():
            connection.request("POST", "/predictions/mixed", b"x")
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                failed.append(response.status)
            is_over.wait(0.02)
        connection.close()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if failed:
        raise CannotMeasure(f"profiling: {len(failed)} requests to the profiled model failed, as with {failed[0]}")


@contextlib.contextmanager
def _profiled(server: Marserve, seconds: float) -> Iterator[None]:
    """Have the model profiled meanwhile. Raises CannotMeasure if that failed."""
    answers: list[int] = []

    def make() -> None:
        answers.append(server.manage("POST", f"/models/mixed/profile?seconds={seconds:g}")[0])

    thread = threading.Thread(target=make)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if answers != [200]:
        raise CannotMeasure(f"profiling: the profile was answered {answers}")


class _NoConnection:
    """Takes what a worker sends, and drops it."""

    def send(self, message: object, bodies: object = ()) -> None:
        """Drop it."""


class _WithoutProfiles(ServedModel):
    """The same as it was before there were profiles."""

    def serve_batch(self, batch: Batch, bodies: list[bytearray]) -> None:
        """Serve it."""
        running.items = batch.items
        try:
            self._serve_batch(batch, bodies)
        finally:
            running.items = ()


def _off(plan: Plan) -> Figure:
    plan.say("profiling: off")
    descriptor = create_page()
    page = Page(descriptor)

    def handle(rows: list[dict[str, Any]], context: Any) -> Any:
        return [bytes(row["body"]) for row in rows]

    def served(kind: type[ServedModel]) -> Callable[[], float]:
        context = Context("m", "", {"model": {"modelName": "m"}}, 1, None, "1", True, MetricsCache(model_name="m"), {})
        model = LoadedModel(handle, context, Load("m", "1.0", "", "h.py", None, None, 1))
        serving = kind(cast("Connection", _NoConnection()), page, model)
        items = [Item("r", [("body", None)], pack_head([], []), None)]
        number = 0

        def run() -> float:
            nonlocal number
            began = time.thread_time()
            for _ in range(BATCHES):
                number += 1
                serving.serve_batch(Batch(number, items), [bytearray(b"x")])
            return (time.thread_time() - began) / BATCHES * 1e6

        run()
        return run

    ours, other = served(ServedModel), served(_WithoutProfiles)
    pairs: list[tuple[float, float]] = []
    for _ in range(plan.rounds):
        pieces = [(ours(), other()) for _ in range(PIECES)]
        pairs.append((statistics.median(each[0] for each in pieces), statistics.median(each[1] for each in pieces)))
    page.close()
    goal = Goal("at most", MOST_OFF, "compared")
    own, beside = zip(*pairs, strict=True)
    name = "a batch of one echo in a worker that is not profiled, CPU time"
    return Figure(name, "µs", own, "as before there were profiles", beside, goal=goal, digits=2)
