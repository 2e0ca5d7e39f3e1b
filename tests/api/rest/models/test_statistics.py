"""Statistics on the management API: of a model's versions, and of the whole server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from marserve.answers.management import DeviceActivity, ModelStatistics, ServerActivity, TimesSoFar, VersionActivity
from marserve.api.rest.application import build_app
from marserve.api.rest.models.management import management_router
from marserve.api.rest.models.statistics import Around, Board, Made, statistics_router
from marserve.telemetry.loop_lag import Interval, LoopLag
from marserve.telemetry.metrics.counts import VersionMetrics
from support.documents import document_of
from support.fake_pool import a_death, a_worker
from support.management_house import client_of
from support.registry_house import House

pytestmark = pytest.mark.anyio

NOTHING_AROUND = Around(at=0.0, is_ready=True, reasons=[], times=TimesSoFar([], [0], 0.0), event_loop=None)


class Stand:
    """The routes over a registry whose pools have no processes, at a time of the test's own."""

    def __init__(self, root: Path) -> None:
        self.house = House(root)
        self.now = 1000.0
        self.devices: list[DeviceActivity] = []
        self.loop_lag = LoopLag(0.0, 1.0)
        routers = [
            statistics_router(self.house.registry, lambda: self.devices, lambda: self.now, self.loop_lag),
            management_router(self.house.registry, enable_model_api=True),
        ]
        self.app = build_app(routers, title="t")

    async def get(self, target: str) -> tuple[int, Any]:
        """Ask."""
        async with client_of(self.app) as client:
            answer = await client.get(target)
        return answer.status_code, answer.json()

    async def add(self, name: str = "m", version: str = "1.0", workers: int = 1) -> VersionMetrics:
        """Register a version; its counts have one sample."""
        await self.house.add(name, version, workers=workers)
        metrics = self.house.pools.made[-1].metrics
        metrics.sample(self.now)
        return metrics


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    """The routes, without a model."""
    return Stand(tmp_path)


def serve(metrics: VersionMetrics, count: int, seconds: float = 0.2, batch: int = 1) -> None:
    """Count requests that were answered."""
    metrics.requests += count
    metrics.answers[200] += count
    for histogram in (metrics.queue_seconds, metrics.handler_seconds, metrics.total_seconds):
        histogram.observe(seconds, times=count)
    metrics.batch_sizes.observe(batch, times=count // batch)


async def test_a_version_s_windows_are_told_with_what_fell_into_each(stand: Stand) -> None:
    """Rates, percentiles, batches, errors by cause."""
    metrics = await stand.add()
    serve(metrics, 100)
    for _ in range(60):  # ten minutes
        stand.now += 10
        metrics.sample(stand.now)
    serve(metrics, 60, 0.3, batch=4)
    metrics.errors["handler"] += 2
    metrics.refused["queue_full"] += 3
    metrics.worker_deaths["killed"] += 1
    metrics.cancelled += 4
    metrics.busy_seconds += 30.0

    status, body = await stand.get("/models/m/stats")

    assert status == 200
    document_of(ModelStatistics, body)
    [version] = body["versions"]
    assert (body["modelName"], version["modelVersion"], version["isDefault"]) == ("m", "1.0", True)
    minute, whole = version["lastMinute"], version["sinceStart"]
    assert (minute["seconds"], minute["requests"], minute["requestsPerSecond"]) == (60.0, 60, 1.0)
    assert (minute["answers"], minute["answersPerSecond"]) == ({"200": 60}, 1.0)
    assert (minute["errors"], minute["refused"]) == ({"handler": 2}, {"queue_full": 3})
    assert (minute["workerDeaths"], minute["cancelled"], minute["busyWorkers"]) == ({"killed": 1}, 4, 0.5)
    assert minute["milliseconds"]["total"] == {
        "count": 60,
        "mean": 300.0,
        "p50": 306.033,
        "p90": 312.005,
        "p95": 312.751,
        "p99": 313.348,
    }
    assert (minute["batches"], minute["meanBatch"]) == (15, 4.0)
    assert minute["batchSizes"] == [{"upTo": 4, "batches": 15}]
    assert version["last5Minutes"]["requests"] == 60
    assert version["last60Minutes"]["requests"] == 160
    assert (whole["seconds"], whole["requests"]) == (600.0, 160)
    assert whole["batchSizes"] == [{"upTo": 1, "batches": 100}, {"upTo": 4, "batches": 15}]


async def test_causes_are_those_of_the_metrics_page(stand: Stand) -> None:
    """A word that the table of causes lacks is `other`."""
    metrics = await stand.add()
    metrics.errors["handler"] = metrics.errors["never heard of"] = metrics.refused["queue_full"] = 1

    [version] = (await stand.get("/models/m/stats"))[1]["versions"]

    assert version["sinceStart"]["errors"] == {"handler": 1, "other": 1}
    assert version["sinceStart"]["refused"] == {"queue_full": 1}


async def test_all_versions_are_told_or_one(stand: Stand) -> None:
    """And of a batch that is larger than any bound, only that."""
    await stand.add()
    serve(await stand.add(version="2.0"), 1000, batch=1000)

    every = (await stand.get("/models/m/stats"))[1]["versions"]
    [one] = (await stand.get("/models/m/2.0/stats"))[1]["versions"]

    assert [(each["modelVersion"], each["isDefault"]) for each in every] == [("1.0", True), ("2.0", False)]
    assert (one["modelVersion"], one["sinceStart"]["batchSizes"]) == ("2.0", [{"upTo": None, "batches": 1}])


async def test_a_version_before_its_first_sample_has_no_windows(stand: Stand) -> None:
    """All that it counted is there."""
    await stand.house.add("m", "1.0")

    [version] = (await stand.get("/models/m/stats"))[1]["versions"]

    assert set(version) == {"modelVersion", "isDefault", "sinceStart", "times", "stages"}
    assert version["sinceStart"]["milliseconds"]["total"] == {"count": 0}


@pytest.mark.parametrize(
    ("target", "status", "words"),
    [
        ("/models/nosuch/stats", 404, "Model not found: nosuch"),
        ("/models/m/9/stats", 404, "9"),
        ("/models/m/stats?since=1h", 400, "since"),
        ("/stats?sort=colour", 400, "sort is 'colour'; it is one of rate, p99, queue, memory, name"),
        ("/stats?limit=0", 400, "limit is 0"),
        ("/stats?limit=x", 400, "limit"),
        ("/stats?limit=1001", 400, "from 1 to 1000"),
        ("/stats?rows=1", 400, "rows"),
        ("/stats?offset=-1", 400, "offset"),
        (f"/stats?search={'x' * 201}", 400, "search has 201 characters; it may have 200"),
    ],
)
async def test_what_cannot_be_told_is_refused_with_what_can(stand: Stand, target: str, status: int, words: str) -> None:
    """A clear answer each."""
    await stand.add()

    answered, body = await stand.get(target)

    assert answered == status
    assert words in body["message"]


async def test_a_version_called_stats_is_described_by_its_parameter(stand: Stand) -> None:
    """It came with a start: a registration of that name is refused."""
    await stand.add()

    assert "versions" in (await stand.get("/models/m/stats"))[1]
    assert (await stand.get("/models/m/1.0"))[1][0]["modelVersion"] == "1.0"


async def test_the_server_s_rows_come_in_the_order_that_was_asked_for(stand: Stand) -> None:
    """With sums over all versions, listed or not."""
    quick, slow = await stand.add("quick"), await stand.add("slow")
    await stand.add("idle", workers=0)
    stand.now += 10
    serve(quick, 100, 0.001)
    serve(slow, 10, 0.3)
    slow.errors["handler"] += 1
    stand.devices = [DeviceActivity(gpuId=0, busyPercent=50.0)]

    status, body = await stand.get("/stats")
    orders = {}
    for sort in ("rate", "p99", "name", "queue", "memory"):
        stand.now += 100
        orders[sort] = [row["modelName"] for row in (await stand.get(f"/stats?sort={sort}"))[1]["versions"]]

    assert status == 200
    document_of(ServerActivity, body)
    assert [row["modelName"] for row in body["versions"]] == ["quick", "slow", "idle"]
    assert (body["versionsInAll"], body["answersPerSecond"]) == (3, 11.0)
    assert body["devices"] == [{"gpuId": 0, "busyPercent": 50.0}]
    assert (body["versions"][1]["p99"], body["versions"][1]["errors"]) == (313.348, 1)
    assert (body["versions"][2]["state"], body["versions"][2]["workers"]) == ("idle", [])
    assert orders["name"] == ["idle", "quick", "slow"]
    assert orders["p99"][0] == "slow"
    assert orders["memory"][-1] == "idle"


async def test_of_many_versions_the_first_are_listed(stand: Stand) -> None:
    """As many as were asked for."""
    for name in "abc":
        await stand.add(name)

    body = (await stand.get("/stats?sort=name&limit=2"))[1]

    assert ([row["modelName"] for row in body["versions"]], body["versionsInAll"]) == (["a", "b"], 3)


async def test_versions_are_searched_for_and_listed_from_a_place_on(stand: Stand) -> None:
    """In whatever case; sums stay those of all."""
    for name in ("Digits-a", "digits-b", "digits-c", "film"):
        metrics = await stand.add(name)
        metrics.errors["handler"] += 1

    found = (await stand.get("/stats?sort=name&search=DIGITS&offset=1&limit=1"))[1]
    beyond = (await stand.get("/stats?offset=4000"))[1]

    assert [row["modelName"] for row in found["versions"]] == ["digits-b"]
    assert (found["versionsFound"], found["versionsInAll"]) == (3, 4)
    assert (beyond["versions"], beyond["versionsFound"]) == ([], 4)


async def test_what_two_answers_differ_by_fell_between_them(stand: Stand) -> None:
    """Times of all versions together, and each stage of one version's requests."""
    first, second = await stand.add("a"), await stand.add("b")
    serve(first, 2, 0.2)
    earlier = (await stand.get("/stats"))[1]
    before = earlier["times"]
    serve(first, 3, 0.2)
    serve(second, 1, 0.002)
    second.errors["handler"] += 1
    first.stages.observe("write", 0.001, 5)
    first.stages.observe("first_chunk", 0.5)
    first.stages.observe("admit", 0.0005)
    stand.now += 10

    body = (await stand.get("/stats"))[1]
    [version] = (await stand.get("/models/a/stats"))[1]["versions"]

    grown = [now - then for now, then in zip(body["times"]["counts"], before["counts"], strict=True)]
    by_bound = dict(zip([*body["times"]["upTo"], None], grown, strict=True))
    assert {bound: count for bound, count in by_bound.items() if count} == {2.5: 1, 250.0: 3}
    assert body["times"]["sum"] - before["sum"] == pytest.approx(602)
    assert body["at"] - earlier["at"] == 10
    assert (body["errors"], body["refused"]) == (1, 0)
    assert sum(version["times"]["counts"]) == 5
    assert version["stages"] == [
        {"name": "admit", "count": 1, "milliseconds": 0.5},
        {"name": "queue", "count": 5, "milliseconds": 1000.0},
        {"name": "handle", "count": 5, "milliseconds": 1000.0},
        {"name": "write", "count": 5, "milliseconds": 5.0},
        {"name": "first_chunk", "count": 1, "milliseconds": 500.0},
    ]


async def test_the_server_says_whether_it_is_ready_and_keeps_up(stand: Stand) -> None:
    """As `/readyz`, with the lateness of its event loop."""
    stand.loop_lag.beat(1.5)
    stand.loop_lag.note_stall(Interval(1.0, 3.25), 2.25)
    await stand.add(workers=0)

    body = (await stand.get("/stats"))[1]

    readiness = stand.house.registry.readiness()
    assert (body["ready"], body["reasons"]) == (readiness.is_ready, [*readiness.reasons, *readiness.remarks])
    assert sum(body["eventLoop"]["lag"]["counts"]) == 1
    assert (body["eventLoop"]["stalls"], body["eventLoop"]["longestStallSeconds"]) == (1, 2.25)


async def test_of_many_reasons_the_first_are_told(stand: Stand) -> None:
    """And how many more there are."""
    stand.house.registry.remarks_of_readiness.append(lambda: [f"remark {number}" for number in range(25)])

    reasons = (await stand.get("/stats"))[1]["reasons"]

    whole = stand.house.registry.readiness()
    more = len(whole.reasons) + len(whole.remarks) - 20
    assert len(reasons) == 21
    assert reasons[-1] == f"and {more} more reasons, which /readyz tells"


async def test_a_row_says_why_a_worker_is_not_there(stand: Stand) -> None:
    """In a line."""
    await stand.add()
    death = a_death("load_failed", "Traceback\nValueError: no weights")
    stand.house.pools.made[-1]._workers = [
        a_worker("9000", "LOADING", last_death=death, next_start_at=float("inf"), waits_for="a GPU"),
        a_worker("9001"),
    ]

    [row] = (await stand.get("/stats"))[1]["versions"]

    assert row["workers"][0]["why"] == (
        "waits: a GPU; died: load_failed: ValueError: no weights; not started again before the model is scaled"
    )
    assert "why" not in row["workers"][1]
    assert (row["readyWorkers"], row["state"], row["memoryBytes"]) == (1, "ready", 100_000_000)


async def test_clients_that_ask_at_once_share_the_rows() -> None:
    """A dashboard that is opened 200 times costs what one costs; a client that goes takes nothing from others."""
    made, now = [0], [0.0]

    def make() -> Iterator[VersionActivity]:
        made[0] += 1
        return iter(())

    board = Board(make, lambda: now[0], lambda: NOTHING_AROUND)
    asking = [asyncio.ensure_future(board.made()) for _ in range(200)]
    await asyncio.sleep(0)
    asking[0].cancel()
    assert await asyncio.gather(*asking[1:]) == [Made([], NOTHING_AROUND)] * 199
    await board.made()
    assert made == [1]

    now[0] += 0.6
    await board.made()
    assert made == [2]


async def test_rows_that_cannot_be_made_are_tried_again() -> None:
    """By the next client."""
    fails = [True]

    def make() -> Iterator[VersionActivity]:
        if fails[0]:
            raise OSError("no /proc")
        return iter(())

    board = Board(make, lambda: 0.0, lambda: NOTHING_AROUND)
    with pytest.raises(OSError, match="no /proc"):
        await board.made()
    fails[0] = False

    assert await board.made() == Made([], NOTHING_AROUND)
