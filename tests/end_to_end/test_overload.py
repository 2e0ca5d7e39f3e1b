"""More than can be done, for real: refusals, deadlines, priorities, neighbours (RELIABILITY D1 to D7).

Three workers sleep 10 ms a request: 300 requests a second are all that the model can do. What `make test` asserts are
promises at three times their figure; the exact ones belong to the long suite.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from support.open_loop import OpenLoop, Outcome, Shot, at_random, count_by_status, evenly, percentile, post
from support.server import Server, make_archive, poll

# The worker looks at the deadline just before it calls the handler: what the thread waited for a processor in between
# is not the server's, nor are 5 ms for other pauses. A worker that did not look would be later than that every time.
SLEEPER = """
import os, time
WAITED = [0.0]
def waited_for_a_processor():
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
def handle(data, context):
    if data is None:
        return None
    began = time.monotonic()
    deadline = context.deadline()
    if deadline is not None and deadline <= began - (waited_for_a_processor() - WAITED[0]) - 0.005:
        print("RUN AFTER ITS DEADLINE")
    time.sleep(0.01)
    word, _, path = bytes(data[0]["body"]).partition(b" ")
    while word == b"until" and not os.path.exists(path):
        time.sleep(0.002)
    WAITED[0] = waited_for_a_processor()
    return [b"done"] * len(data)
"""
RUN_S = 0.01
WORKERS = 3
CAPACITY = WORKERS / RUN_S
QUEUE = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with two models of the same kind, and one that is quick."""
    folder = tmp_path_factory.mktemp("overload")
    store = folder / "store"
    store.mkdir()
    workers = f"minWorkers: {WORKERS}\nmaxWorkers: {WORKERS}\njobQueueSize: {QUEUE}\n"
    make_archive(store / "busy.mar", SLEEPER, config=workers)
    make_archive(store / "other.mar", SLEEPER, config=f"minWorkers: 1\nmaxWorkers: 1\njobQueueSize: {QUEUE}\n")
    with Server(folder, store=store) as server:
        for name in ("busy", "other"):
            server.register(f"{name}.mar").raise_for_status()
        yield server


def fire(server: Server, *groups: tuple[str, list[float], bytes]) -> dict[str, list[Outcome]]:
    """Send each group's requests at its due times, all groups together; outcomes by group."""
    shots = [Shot(due, name, request) for name, dues, request in groups for due in dues]
    port = urlsplit(server.inference).port
    assert port is not None

    async def run() -> list[Outcome]:
        return await OpenLoop(port).fire(shots)

    outcomes = asyncio.run(run())
    assert len(outcomes) == len(shots)
    assert 0 not in count_by_status(outcomes), "a request got no answer"
    return {name: [each for each in outcomes if each.shot.name == name] for name, _, _ in groups}


def latencies(outcomes: list[Outcome], *statuses: int) -> list[float]:
    """Of those that ended with one of these statuses, from when they were due."""
    return [outcome.latency_s for outcome in outcomes if outcome.status in statuses]


def metric(server: Server, name: str, model: str = "busy") -> float:
    """The sum of a metric's lines about a model."""
    page = httpx.get(f"{server.metrics}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(f"{name}{{") and f'"{model}"' in line]
    assert lines, f"no {name} of {model}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def wait_until_idle(server: Server) -> None:
    """Until nothing waits and nothing runs."""
    for _ in poll(5, "the queue is empty"):
        described = server.describe("busy")
        if described["jobQueueStatus"]["pendingRequests"] == 0 and described["runningRequests"] == 0:
            return


class Beside:
    """Calls that somebody makes again and again while the load runs, in a thread; how long each took."""

    def __init__(self, url: str, pause_s: float) -> None:
        self.took_s: list[float] = []
        self.statuses: set[int] = set()
        self._url, self._pause_s = url, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._call)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _call(self) -> None:
        with httpx.Client() as client:
            while not self._stop.wait(self._pause_s):
                began = time.monotonic()
                self.statuses.add(client.get(self._url).status_code)
                self.took_s.append(time.monotonic() - began)


def hold_once(check: Callable[[], None], rounds: int = 3) -> None:
    """A bound of time holds if it holds in one of a few rounds: whoever else uses the machine may spoil the others."""
    for left in reversed(range(rounds)):
        try:
            check()
        except AssertionError:
            if not left:
                raise
        else:
            return


# ------------------------------------------------------------------------------------------- refusals


def test_a_refusal_says_why_and_when_to_come_back(server: Server) -> None:
    """TorchServe's text, a computed `Retry-After`, and the class of cause; first, as floods lengthen the times."""
    # 300 are refused, of which 200 a second could be served: a second and a half at least.
    flood = fire(server, ("flood", [0.0] * (QUEUE + WORKERS + 300), post("busy")))["flood"]

    refused = [outcome for outcome in flood if outcome.status == 503]
    assert refused
    assert all(b"has no worker to serve inference request" in outcome.body for outcome in refused)
    moments = {outcome.retry_after or 0 for outcome in refused}
    assert len(moments) > 1, "all are told one time"
    assert min(moments) in {1, 2}
    assert moments == set(range(min(moments), max(moments) + 1)), "one second after another as the queue drains"
    assert metric(server, "marserve_model_refused_total") >= len(refused)


def overload(server: Server, seconds: float, *, factor: float) -> None:
    """D1, D2, D6 and D7 in one run; `factor` is what figures are multiplied with."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    fire(server, ("warm", evenly(CAPACITY, 0.5), post("busy")))
    wait_until_idle(server)
    memory_before = process.memory_info().rss

    with (
        Beside(f"{server.management}/models/busy", 0.1) as management,
        Beside(f"{server.metrics}/metrics", 0.1) as scrapes,
    ):
        outcomes = fire(server, ("flood", at_random(3 * CAPACITY, seconds, 1), post("busy")))["flood"]
        recovery = fire(server, ("after", at_random(CAPACITY / 2, 3.0, 2), post("busy")))["after"]

    counts = count_by_status(outcomes)
    refused = [outcome for outcome in outcomes if outcome.status != 200]
    assert set(counts) == {200, 503}
    assert all(outcome.retry_after is not None and 1 <= outcome.retry_after <= 90 for outcome in refused)
    assert percentile([outcome.exchange_s for outcome in refused], 0.99) < 0.005 * factor
    assert counts[200] >= (0.9 if factor == 1 else 0.7) * CAPACITY * seconds
    bound_s = (QUEUE + WORKERS) / WORKERS * RUN_S + RUN_S
    assert percentile(latencies(outcomes, 200), 0.99) < bound_s * max(2.0, factor)
    # Half the load again: as if nothing had been.
    settled = [outcome for outcome in recovery if outcome.shot.due_s > 2.0]
    assert count_by_status(settled) == {200: len(settled)}
    assert percentile([outcome.latency_s for outcome in settled], 0.99) < 0.05 * factor
    wait_until_idle(server)
    assert process.memory_info().rss < memory_before * 1.1 + 8e6
    # And whoever looks after the server is not kept waiting.
    assert management.statuses == scrapes.statuses == {200}
    assert max(management.took_s) < 0.5 * factor
    assert percentile(scrapes.took_s, 0.99) < 0.1 * factor


@pytest.mark.long
def test_a_flood_is_refused_quickly_and_leaves_nothing_behind(server: Server) -> None:
    """Three times what can be done, for two seconds; then half of it (RELIABILITY D1, D2, D6, D7)."""
    hold_once(lambda: overload(server, 2.0, factor=3))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_flood_of_a_minute_is_refused_within_five_milliseconds(server: Server) -> None:
    """The exact figures."""
    overload(server, 60.0, factor=1)


def served_in_a_flood(server: Server, seconds: float, seed: int) -> int:
    """How many of a flood are answered."""
    outcomes = fire(server, ("flood", at_random(3 * CAPACITY, seconds, seed), post("busy")))["flood"]
    wait_until_idle(server)
    return count_by_status(outcomes)[200]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_scrapes_cost_a_flooded_server_less_than_three_percent(server: Server) -> None:
    """Ten a second; the median of five pairs (RELIABILITY D7)."""
    losses = []
    for seed in range(20, 25):
        alone = served_in_a_flood(server, 6.0, seed)
        with Beside(f"{server.metrics}/metrics", 0.1) as scrapes:
            beside = served_in_a_flood(server, 6.0, seed)
        assert scrapes.statuses == {200}
        assert len(scrapes.took_s) > 30
        losses.append(1 - beside / alone)

    assert statistics.median(losses) < 0.03, losses


# ------------------------------------------------------------------------------------------- deadlines


def test_expired_work_never_reaches_a_handler(server: Server) -> None:
    """Half the clients give 100 ms at twice the load: the queue alone takes about as long (RELIABILITY D3)."""
    rate, seconds = CAPACITY, 2.0
    outcomes = fire(
        server,
        ("hurried", at_random(rate, seconds, 3), post("busy", X_Marserve_Timeout_Ms=100)),
        ("patient", at_random(rate, seconds, 4), post("busy")),
    )

    hurried = outcomes["hurried"]
    assert set(count_by_status(hurried)) <= {200, 503, 504}
    assert count_by_status(hurried)[200] < 0.9 * len(hurried), "nobody was too late: this shows nothing"
    assert set(count_by_status(outcomes["patient"])) <= {200, 503}
    assert metric(server, "marserve_expired_run_total") == 0
    assert "RUN AFTER ITS DEADLINE" not in server.output()


def test_a_deadline_that_cannot_be_kept_is_refused_before_it_costs_anything(server: Server, tmp_path: Path) -> None:
    """Behind twenty-seven requests of 10 ms for three workers, 50 ms cannot be enough."""
    fire(server, ("warm", evenly(CAPACITY / 2, 0.1), post("busy")))  # so that it is known how long one runs
    end = tmp_path / "end"
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(fire, server, ("held", [0.0] * WORKERS, post("busy", b"until %s" % bytes(end))))
        try:
            wait_until_accepted(server, WORKERS)
            others = threads.submit(fire, server, ("others", [0.0] * (QUEUE - WORKERS), post("busy")))
            wait_until_accepted(server, QUEUE)

            hurried = [server.predict("busy", b"x", **{"x-marserve-timeout-ms": "50"}) for _ in range(3)]
        finally:
            end.touch()

    assert {answer.status_code for answer in hurried} <= {503, 504}  # 504: it was read when its time was over
    assert any("would wait about" in answer.text for answer in hurried)
    assert count_by_status(running.result()["held"] + others.result()["others"]) == {200: QUEUE}
    assert metric(server, "marserve_expired_run_total") == 0


def wait_until_accepted(server: Server, count: int) -> None:
    """Until so many requests run or wait; some that wait are with a worker already."""
    for _ in poll(20, f"{count} requests run or wait"):
        described = server.describe("busy")
        if described["runningRequests"] + described["jobQueueStatus"]["pendingRequests"] == count:
            return


# ------------------------------------------------------------------------------------------- neighbours


def neighbours(server: Server, seconds: float, *, factor: float) -> None:
    """D4: the p99 of a model at 30 % of its capacity, alone and beside a flooded one."""
    dues = at_random(0.3 / RUN_S, seconds, 5)

    quiet = fire(server, ("other", dues, post("other")))["other"]
    outcomes = fire(
        server, ("other", dues, post("other")), ("flood", at_random(3 * CAPACITY, seconds, 6), post("busy"))
    )

    loud = outcomes["other"]
    assert count_by_status(loud) == {200: len(dues)}
    assert count_by_status(outcomes["flood"])[503] > 0
    limit_s = 2 * max(percentile(latencies(quiet, 200), 0.99), 2 * RUN_S)
    assert percentile(latencies(loud, 200), 0.99) <= limit_s * factor


def test_a_flooded_model_does_not_hurt_another(server: Server) -> None:
    """They share the event loop and nothing else."""
    hold_once(lambda: neighbours(server, 2.0, factor=3))


@pytest.mark.long
def test_a_flooded_model_at_most_doubles_the_p99_of_another(server: Server) -> None:
    """The exact figure (RELIABILITY D4)."""
    neighbours(server, 20.0, factor=1)


# ------------------------------------------------------------------------------------------- priorities


def priorities(server: Server, seconds: float, *, factor: float) -> None:
    """D5: one in ten is urgent, at twice the load; the median of three pairs."""
    dues = at_random(0.2 * CAPACITY, seconds, 7)
    urgent = post("busy", X_Marserve_Priority=0)
    ratios = []
    for seed in (8, 9, 10):
        quiet = fire(server, ("urgent", dues, urgent))["urgent"]
        low = at_random(1.8 * CAPACITY, seconds, seed)
        outcomes = fire(server, ("urgent", dues, urgent), ("low", low, post("busy")))

        assert count_by_status(outcomes["urgent"]) == {200: len(dues)}
        before_s = max(percentile(latencies(quiet, 200), 0.99), 2 * RUN_S)
        ratios.append(percentile(latencies(outcomes["urgent"], 200), 0.99) / before_s)
        # What the urgent leave is the others': they are not starved.
        assert count_by_status(outcomes["low"])[200] >= 0.5 * 0.8 * CAPACITY * seconds
    assert sorted(ratios)[1] <= 1.5 * factor, ratios


def test_urgent_requests_do_not_notice_the_load_of_the_others(server: Server) -> None:
    """Nor are they refused because the queue is full of others."""
    hold_once(lambda: priorities(server, 1.0, factor=3))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_urgent_requests_keep_their_p99_at_twice_the_load(server: Server) -> None:
    """The exact figure (RELIABILITY D5)."""
    priorities(server, 20.0, factor=1)


def test_the_model_says_its_default_priority(server: Server) -> None:
    """In describe, where nobody set one: 5."""
    assert server.describe("busy")["defaultPriority"] == 5
