"""Tests for starts that fail through the fault of a machine: another may do, so they are no failed load at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.errors import LoadFailed
from marserve.pool.launchers.launcher import StartFailed
from marserve.pool.slots import restart_policy
from marserve.pool.worker_end.cause_of_death import Cause, Death
from support.model_folders import OBEDIENT
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

FailStarts = Callable[[RunningPool, Cause, int], None]


@pytest.fixture
def fail_starts(monkeypatch: pytest.MonkeyPatch) -> FailStarts:
    """Has so many starts of a pool fail; the pauses between them are none."""
    monkeypatch.setattr(restart_policy, "RETRY_DELAYS_S", (0.0,) * 8)

    def fail(running: RunningPool, cause: Cause, times: int) -> None:
        launch, left = running.pool.launcher.launch, iter(range(times))

        async def launch_or_fail(*ends: Any, **more: Any) -> Any:
            if next(left, None) is not None:
                raise StartFailed(Death(cause, "no room there"))
            return await launch(*ends, **more)

        monkeypatch.setattr(running.pool.launcher, "launch", launch_or_fail)

    return fail


@pytest.mark.parametrize("cause", [Cause.NODE_LOST, Cause.NODE_UNFIT])
async def test_a_start_is_tried_elsewhere_before_the_load_has_failed(
    tmp_path: Path, fail_starts: FailStarts, cause: Cause
) -> None:
    """Whoever waits for the workers hears nothing of it."""
    async with RunningPool(tmp_path, OBEDIENT, workers=1) as running:
        fail_starts(running, cause, 2)

        await running.start()

        assert running.metrics.worker_deaths[cause.value] == 2
        assert await running.ask_body(b"here") == b"here"


async def test_after_three_in_a_row_the_load_has_failed(tmp_path: Path, fail_starts: FailStarts) -> None:
    """With the last reason."""
    async with RunningPool(tmp_path, OBEDIENT, workers=1) as running:
        fail_starts(running, Cause.NODE_UNFIT, 3)

        with pytest.raises(LoadFailed) as failed:
            await running.start()

        assert (failed.value.reason, failed.value.cause) == ("no room there", "node_unfit")


async def test_where_nothing_is_tried_again_the_first_one_counts(tmp_path: Path, fail_starts: FailStarts) -> None:
    """`maxRetryTimeoutInSec: 0` gives up at once."""
    async with RunningPool(tmp_path, OBEDIENT, workers=1, max_retry_timeout_s=0.0) as running:
        fail_starts(running, Cause.NODE_LOST, 1)

        with pytest.raises(LoadFailed):
            await running.start()


async def test_what_is_the_models_fault_counts_at_once(tmp_path: Path, fail_starts: FailStarts) -> None:
    """As ever."""
    async with RunningPool(tmp_path, OBEDIENT, workers=1) as running:
        fail_starts(running, Cause.LOAD_FAILED, 1)

        with pytest.raises(LoadFailed):
            await running.start()
