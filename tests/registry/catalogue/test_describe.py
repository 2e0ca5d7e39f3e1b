"""Tests for what a version says of itself."""

from __future__ import annotations

import math
from time import monotonic
from typing import Any

import pytest

from marserve.messages import Load
from marserve.model_options import ModelOptions
from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.describe import Facts, describe_version
from marserve.telemetry.metrics.counts import VersionMetrics
from support.fake_pool import Behaviour, FakePool, a_death, a_worker

pytestmark = pytest.mark.anyio

LOAD = Load("m", "1.0", "", "echo.py", None, None, 1)

# Contract 2.5, in its order.
MEMBERS = [
    "modelName",
    "modelVersion",
    "modelUrl",
    "runtime",
    "minWorkers",
    "maxWorkers",
    "batchSize",
    "maxBatchDelay",
    "responseTimeout",
    "startupTimeout",
    "maxRetryTimeoutInSec",
    "clientTimeoutInMills",
    "parallelType",
    "parallelLevel",
    "deviceType",
    "continuousBatching",
    "useJobTicket",
    "useVenv",
    "stateful",
    "sequenceMaxIdleMSec",
    "sequenceTimeoutMSec",
    "maxNumSequence",
    "maxSequenceJobQueueSize",
    "loadedAtStartup",
    "workers",
    "jobQueueStatus",
]


def describe(
    options: PoolOptions, config: ModelOptions | None = None, *, as_torchserve: bool = False, **changes: Any
) -> dict[str, Any]:
    """The description of a version with these options; `changes` are set on its pool."""
    pool = FakePool(options, LOAD, Behaviour())
    pool.start()
    for name, value in changes.items():
        setattr(pool, name, value)
    facts = Facts("m.mar", "python", options, config or ModelOptions(), is_at_startup=False)
    return describe_version(
        facts,
        pool,
        options,
        is_default=True,
        as_torchserve=as_torchserve,
    )


async def test_torchserve_s_members_come_first_in_its_order() -> None:
    """And have its units."""
    described = describe(PoolOptions("m", "1.0", 1, 2, batch_size=4, max_batch_delay_s=0.077, client_timeout_s=0.25))

    assert list(described)[: len(MEMBERS)] == MEMBERS
    assert (described["maxBatchDelay"], described["clientTimeoutInMills"]) == (77, 250)
    assert (described["responseTimeout"], type(described["responseTimeout"])) == (120, int)


async def test_the_last_minute_is_described_after_the_first_sample() -> None:
    """A rate needs two points in time."""
    metrics = VersionMetrics("m", "1.0")
    fresh = describe(PoolOptions("m", "1.0", 1, 1), metrics=metrics)
    metrics.sample(monotonic() - 10)
    metrics.total_seconds.observe(0.01, times=50)
    metrics.batch_sizes.observe(2, times=25)

    described = describe(PoolOptions("m", "1.0", 1, 1), metrics=metrics)

    assert "lastMinute" not in fresh
    assert described["lastMinute"]["requestsPerSecond"] == pytest.approx(5.0, rel=0.2)
    assert described["lastMinute"]["meanBatch"] == 2.0


async def test_a_worker_without_a_process_has_no_pid() -> None:
    """`kill` takes -1 for every process; only a server that stands in for TorchServe says it, as is recorded."""
    workers = [a_worker("9000", status="LOADING", pid=-1), a_worker("9001", pid=4711)]
    told = {
        entry: [
            worker.get("pid")
            for worker in describe(PoolOptions("m", "1.0", 1, 2), workers=lambda: workers, as_torchserve=entry)[
                "workers"
            ]
        ]
        for entry in (False, True)
    }

    assert told == {False: [None, 4711], True: [-1, 4711]}


async def test_what_a_model_declares_is_no_member_of_torchserve_s() -> None:
    """ONNX models and exported programs declare themselves, so archives made for TorchServe have a declaration, too."""
    declared = {"version": 1, "kind": "tensors"}

    ours, theirs = (
        describe(PoolOptions("m", "1.0", 1, 1), as_torchserve=as_torchserve, declaration=declared)
        for as_torchserve in (False, True)
    )

    assert ours["declaration"] == declared
    assert "declaration" not in theirs


async def test_a_worker_is_described_in_utc() -> None:
    """TorchServe writes local time and calls it UTC (contract, Q16)."""
    workers = [a_worker("9000", gpu_id=1, gpu_usage="gpuId::1", restarts=2, last_death=a_death())]

    described = describe(PoolOptions("m", "1.0", 1, 1, gpu_ids=(0, 1)), _workers=workers)

    assert described["workers"] == [
        {
            "id": "9000",
            "startTime": "2023-11-14T22:13:20.250Z",
            "status": "READY",
            "memoryUsage": 50_000_000,
            "pid": 4711,
            "gpu": True,
            "gpuUsage": "gpuId::1",
            "restarts": 2,
            "gpuId": 1,
            "lastDeath": {"cause": "killed", "at": "2023-11-14T22:13:20.000Z", "detail": "killed by SIGKILL"},
        }
    ]
    assert described["deviceType"] == "gpu"


@pytest.mark.parametrize(
    ("next_start_at", "told"),
    [(1_700_000_300.5, "2023-11-14T22:18:20.500Z"), (math.inf, "when scaled"), (None, None)],
)
async def test_a_worker_that_waits_for_its_next_try_says_until_when(
    next_start_at: float | None, told: str | None
) -> None:
    """Or that it waits to be scaled."""
    workers = [a_worker("9000", status="UNLOADING", next_start_at=next_start_at)]

    described = describe(PoolOptions("m", "1.0", 1, 1), _workers=workers)

    assert described["workers"][0].get("nextStart") == told
    assert ("nextStart" in described["workers"][0]) is (told is not None)


async def test_members_without_a_value_are_left_out() -> None:
    """Never null."""
    described = describe(PoolOptions("m", "1.0", 1, 1))

    assert not {"deviceIds", "warnings", "lastDeath", "customizedMetadata"} & set(described)
    assert None not in described.values()
    assert described["workers"][0]["gpuUsage"] == "N/A"


async def test_a_group_of_ranks_tells_their_processes_and_devices() -> None:
    """Other workers have no such members."""
    options = PoolOptions("m", "1.0", 2, 2, gpu_ids=(0, 1))

    described = describe(options, _workers=[a_worker("29500", ranks=(7, 8), devices=(0, 1)), a_worker("9000")])

    group, other = described["workers"]
    assert group["ranks"] == [{"rank": 0, "pid": 7}, {"rank": 1, "pid": 8}]
    assert group["gpuIds"] == [0, 1]
    assert not {"ranks", "gpuIds"} & other.keys()


async def test_device_ids_are_shown_only_where_they_are_used() -> None:
    """A list that the server cannot use is not."""
    config = ModelOptions(device_ids=(1,))

    assert describe(PoolOptions("m", "1.0", 0, 0, gpu_ids=(1,)), config)["deviceIds"] == [1]
    assert "deviceIds" not in describe(PoolOptions("m", "1.0", 0, 0, gpu_ids=(0, 1)), config)


async def test_figures_of_sequences_are_shown_only_with_an_idle_limit() -> None:
    """Contract 2.5: 0 otherwise."""
    with_limit = ModelOptions(sequence_batching=True, sequence_max_idle_s=3.0, max_num_sequence=2)
    options = PoolOptions("m", "1.0", 0, 0)

    described = describe(options, with_limit)

    assert (described["stateful"], described["sequenceMaxIdleMSec"]) == (True, 3000)
    assert (described["maxNumSequence"], described["maxSequenceJobQueueSize"]) == (2, 1)
    assert describe(options)["maxNumSequence"] == 0


async def test_the_queue_is_described_as_it_stands() -> None:
    """Room left is never negative."""
    options = PoolOptions("m", "1.0", 1, 1, queue_size=2)

    described = describe(options, held=[object(), object(), object()])

    assert described["jobQueueStatus"] == {"remainingCapacity": 0, "pendingRequests": 3}


@pytest.mark.parametrize(
    ("least", "changes", "state"),
    [
        (1, {}, "ready"),
        (0, {}, "idle"),
        (1, {"_workers": [a_worker("1", "LOADING")]}, "loading"),
        (2, {"_workers": [a_worker("1")]}, "loading"),
        (1, {"_workers": [a_worker("1", "LOADING")], "is_healthy": False}, "failed"),
        (2, {"_workers": [a_worker("1"), a_worker("2", "LOADING", last_death=a_death())]}, "degraded"),
        (2, {"_workers": [a_worker("1", last_death=a_death()), a_worker("2", "LOADING")]}, "loading"),
    ],
)
async def test_a_version_says_how_it_stands(least: int, changes: dict[str, Any], state: str) -> None:
    """In one word."""
    assert describe(PoolOptions("m", "1.0", least, 2), **changes)["state"] == state


async def test_warnings_of_the_pool_and_its_last_death_are_told() -> None:
    """Behind those of the registration."""
    described = describe(PoolOptions("m", "1.0", 1, 1), warnings=["forking was refused"], last_death=a_death("exit"))

    assert described["warnings"] == ["forking was refused"]
    assert described["lastDeath"]["cause"] == "exit"


async def test_a_deaths_traceback_and_last_lines_are_told_where_there_are_any() -> None:
    """Empty ones are left out."""
    death = a_death("load_failed", traceback="Traceback …", last_lines=("loading", "no weights"))

    told = describe(PoolOptions("m", "1.0", 1, 1), last_death=death)["lastDeath"]
    plain = describe(PoolOptions("m", "1.0", 1, 1), last_death=a_death())["lastDeath"]

    assert (told["traceback"], told["lastLines"]) == ("Traceback …", ["loading", "no weights"])
    assert set(plain) == {"cause", "at", "detail"}


async def test_what_bounds_a_workers_life_is_told_where_it_is_set() -> None:
    """Under the names of the model's configuration; defaults are left out."""
    options = PoolOptions(
        "m",
        "1.0",
        1,
        1,
        max_worker_memory_bytes=300,
        max_requests_per_worker=1000,
        max_worker_age_s=60.0,
        max_worker_growth_bytes=7,
        health_interval_s=2.5,
        max_restarts=5,
        no_restart_exit_codes=(3,),
        on_crash="fail",
        readiness_rule="min",
        is_concurrent=True,
        most_concurrent=8,
        idle_timeout_s=90.0,
        queue_size=7,
        retry_failed_every_s=2.5,
    )
    expected = {
        "maxConcurrentRequests": 8,
        "idleTimeout": 90,
        "maxWorkerMemory": 300,
        "maxRequestsPerWorker": 1000,
        "maxWorkerAge": 60,
        "maxWorkerGrowth": 7,
        "healthInterval": 2.5,
        "maxRestarts": 5,
        "noRestartExitCodes": [3],
        "onCrash": "fail",
        "readinessRule": "min",
    }

    described = describe(options)
    assert {name: described[name] for name in expected} == expected
    assert (described["jobQueueSize"], described["retryFailedEvery"]) == (7, 2.5)
    plain = describe(PoolOptions("m", "1.0", 1, 1, idle_timeout_s=math.inf))
    assert not set(expected) & set(plain)
    assert (plain["jobQueueSize"], plain["retryFailedEvery"]) == (100, 300)
