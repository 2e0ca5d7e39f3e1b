"""What is left of a version in the server: the memory that unpacking freed goes back to the system."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.errors import NotEnoughMemory
from marserve.registry.changes import registering
from marserve.registry.intake.registration import RegisterParameters
from support.fake_pool import FakePool
from support.management_house import House

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """What they run on."""
    return "asyncio"


async def test_free_memory_is_given_back_when_a_version_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for each of many that go at once: it takes a few milliseconds."""
    given_back: list[int] = []
    monkeypatch.setattr(registering, "give_back_free_memory", lambda: given_back.append(1))
    house = House(tmp_path, unregister_timeout_s=0.2)

    for number in range(3):
        url = house.put(f"m{number}")
        await house.registry.register(RegisterParameters(url, initial_workers=1))
        await house.registry.unregister(f"m{number}")
    await house.registry.stop()

    assert given_back == [1]
    assert house.folders() == []


async def test_a_version_that_there_is_no_memory_for_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when it is registered nor when it is scaled: then it goes on as it was."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    await house.registry.register(RegisterParameters(house.put("m"), initial_workers=1))
    refusal = NotEnoughMemory("m", "1.0", needed_bytes=3, source="declared", could_be_had=1, budget_bytes=2)

    def refuse(*_: object) -> None:
        raise refusal

    monkeypatch.setattr(FakePool, "scale", refuse)
    with pytest.raises(NotEnoughMemory):
        await house.registry.scale("m", None, min_workers=9, max_workers=9, synchronous=True)
    described = house.registry.describe("m")
    monkeypatch.setattr(FakePool, "__init__", refuse)
    with pytest.raises(NotEnoughMemory):
        await house.registry.register(RegisterParameters(house.put("large"), initial_workers=1))
    folders = house.folders()
    await house.registry.stop()

    assert (described["minWorkers"], described["maxWorkers"]) == (1, 1)
    assert len(folders) == 1
    assert house.metrics.shown == []
