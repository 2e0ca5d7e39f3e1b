"""The desired state over HTTP: what is only to be tried is never done."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.api.application import build_app
from marserve.api.desired_state import desired_state_router
from marserve.rollout.history import History
from marserve.rollout.reconciler import Reconciler
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio

EMPTY = b"models: {}\n"


async def test_a_dry_run_that_is_not_understood_changes_nothing(tmp_path: Path) -> None:
    """What counts as false elsewhere would here apply what was only to be tried."""
    house = House(tmp_path)
    reconciler = Reconciler(
        house.registry, History(tmp_path / "state"), None, interval_s=60.0, weigh=lambda version: None
    )
    async with client_of(build_app([desired_state_router(reconciler, enable_model_api=True)], title="t")) as client:
        odd = [
            await client.put("/desired-state?dry_run=yes", content=EMPTY),
            await client.post("/desired-state/undo?dry_run=1"),
        ]
        planned = await client.put("/desired-state?dry_run=True", content=EMPTY)
        assert reconciler.current is None

        applied = await client.put("/desired-state?dry_run=false", content=EMPTY)
        assert reconciler.current is not None

    assert [answer.status_code for answer in odd] == [400, 400]
    assert "dry_run is 'yes'; it must be true or false." in odd[0].json()["message"]
    assert (planned.status_code, planned.json()["isEmpty"]) == (200, True)
    assert applied.status_code == 200
    await house.registry.stop()
