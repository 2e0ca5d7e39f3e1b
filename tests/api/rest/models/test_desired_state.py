"""The desired state over HTTP: what is only to be tried is never done."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.api.rest.application import build_app
from marserve.api.rest.models.desired_state import desired_state_router
from marserve.desired_state.history import History
from marserve.desired_state.reconciler import Reconciler
from marserve.registry.intake.registration import RegisterParameters
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

        odd += [
            await client.put("/desired-state?prune=yes", content=EMPTY),
            await client.put("/desired-state?prune=true&adopt=true", content=EMPTY),
            await client.post("/desired-state/undo?adopt=1"),
        ]

    assert [answer.status_code for answer in odd] == [400] * 5
    assert "prune is 'yes'; it must be true or false." in odd[2].json()["message"]
    assert "dry_run is 'yes'; it must be true or false." in odd[0].json()["message"]
    assert (planned.status_code, planned.json()["isEmpty"]) == (200, True)
    assert applied.status_code == 200
    await house.registry.stop()


async def test_what_no_document_named_is_unloaded_only_if_that_is_said(tmp_path: Path) -> None:
    """409 with both ways; the plan and a dry run say which models, and adopting gives the document."""
    house = House(tmp_path)
    house.put("m", "1.0")
    await house.registry.register(RegisterParameters("m-1.0.mar", initial_workers=1))
    reconciler = Reconciler(house.registry, History(None))
    async with client_of(build_app([desired_state_router(reconciler, enable_model_api=True)], title="t")) as client:
        refused = await client.put("/desired-state", content=EMPTY)
        plans = [
            await client.post("/desired-state/plan", content=EMPTY),
            await client.put("/desired-state?dry_run=true", content=EMPTY),
            await client.put("/desired-state?dry_run=true&adopt=true", content=EMPTY),
        ]
        adopted = await client.put("/desired-state?adopt=true", content=EMPTY)

    assert (refused.status_code, refused.json()["type"]) == (409, "ConflictStatusException")
    named = [{"model": "m", "version": "1.0"}]
    assert [plan.json().get("unnamed") for plan in plans] == [named, named, None]
    assert [plan.json().get("adopted") for plan in plans] == [None, None, named]
    assert adopted.json()["adopted"] == named
    assert "url: m-1.0.mar" in adopted.json()["document"]
    assert (await reconciler.plan(adopted.json()["document"].encode())).is_empty
    await house.registry.stop()
