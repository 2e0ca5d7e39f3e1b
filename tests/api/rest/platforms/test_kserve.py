"""Tests for `/v1/models`, which clients of KServe and of OpenAI read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from marserve.api.errors import ErrorRules
from marserve.api.rest.application import build_app
from marserve.api.rest.platforms.kserve import kserve_router
from marserve.registry.intake.registration import RegisterParameters
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio


async def ask(house: House, path: str) -> tuple[int, Any]:
    """Status and document of an answer."""
    app = build_app([kserve_router(house.registry)], title="t", error_rules=ErrorRules(as_recorded=False))
    async with client_of(app) as client:
        answer = await client.get(path)
        return answer.status_code, answer.json()


async def test_a_model_that_is_not_there_is_404(tmp_path: Path) -> None:
    """And an empty server has an empty list."""
    house = House(tmp_path)

    assert (await ask(house, "/v1/models/other"))[0] == 404
    assert await ask(house, "/v1/models") == (200, {"object": "list", "data": [], "models": []})


async def test_a_model_has_the_keys_of_both_and_is_503_until_it_can_answer(tmp_path: Path) -> None:
    """The list has all, ready or not."""
    house, before = House(tmp_path), int(time.time())
    for name, workers in (("ready", 1), ("a/b", 0)):
        archive = house.put("x", "1.0" if workers else "2.0")
        await house.registry.register(RegisterParameters(archive, model_name=name, initial_workers=workers))

    status, ready = await ask(house, "/v1/models/ready")
    created = ready.pop("created")
    assert (status, ready) == (
        200,
        {"id": "ready", "object": "model", "owned_by": "marserve", "name": "ready", "ready": True},
    )
    assert before <= created <= time.time()

    status, other = await ask(house, "/v1/models/a%2Fb")
    assert (status, other["id"], other["ready"]) == (503, "a/b", False)
    assert (other["reason"], other["workers"]) == ("it is scaled to 0 workers", {"ready": 0, "needed": 1})

    status, models = await ask(house, "/v1/models")
    assert (status, models["object"], models["models"]) == (200, "list", ["a/b", "ready"])
    assert [each["id"] for each in models["data"]] == ["a/b", "ready"]
