"""Tests for ending what workers leave behind: who asks together is answered together, and nobody waits in vain."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping

import pytest

from marserve.pool.launchers import leftovers as module
from marserve.pool.launchers.leftovers import Leftovers

pytestmark = [
    pytest.mark.true_starts,  # what is left behind is found by the environment of its start
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody can be told"),
]


class Looks:
    """In place of looking through all processes: notes what for, and takes as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, int]] = []
        self.may_end = threading.Event()
        self.error: Exception | None = None
        monkeypatch.setattr(module, "end_families", self)

    def __call__(self, lineages: Mapping[str, int]) -> list[int]:
        """One look."""
        self.asked.append(dict(lineages))
        assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error
        return [4711]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Looks that the test lets end."""
    return Looks(monkeypatch)


async def test_who_asks_while_somebody_looks_is_answered_by_the_next_look(looks: Looks) -> None:
    """All of them by one: a look that has begun may have passed their processes already."""
    leftovers = Leftovers()
    first = asyncio.create_task(leftovers.end("s/t/1", 11))
    while not looks.asked:
        await asyncio.sleep(0.001)
    later = [asyncio.create_task(leftovers.end(f"s/t/{number}", number)) for number in (2, 3)]
    await asyncio.sleep(0)

    looks.may_end.set()
    await asyncio.gather(first, *later)

    assert looks.asked == [{"s/t/1": 11}, {"s/t/2": 2, "s/t/3": 3}]


async def test_what_was_ended_is_logged(looks: Looks, caplog: pytest.LogCaptureFixture) -> None:
    """With the processes' numbers."""
    caplog.set_level("INFO")
    looks.may_end.set()

    await Leftovers().end("s/t/1")

    assert "processes 4711" in caplog.text


async def test_a_look_that_fails_keeps_nobody_waiting(looks: Looks, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the next one is made."""
    leftovers = Leftovers()
    looks.may_end.set()
    looks.error = OSError("no more descriptors")

    await leftovers.end("s/t/1")
    looks.error = None
    await leftovers.end("s/t/2")

    assert "no more descriptors" in caplog.text
    assert looks.asked == [{"s/t/1": 0}, {"s/t/2": 0}]


async def test_who_stops_waiting_stops_nobody_else(looks: Looks) -> None:
    """A worker's start may be given up while its predecessor's leftovers are looked for."""
    leftovers = Leftovers()
    impatient = asyncio.create_task(leftovers.end("s/t/1"))
    patient = asyncio.create_task(leftovers.end("s/t/2"))
    while not looks.asked:
        await asyncio.sleep(0.001)

    impatient.cancel()
    looks.may_end.set()

    await patient
    with pytest.raises(asyncio.CancelledError):
        await impatient


async def test_lineages_are_below_the_servers_and_never_the_same() -> None:
    """The server's word first."""
    leftovers = Leftovers()
    child, other = leftovers.child("t"), leftovers.child("t")

    assert child.split("/")[:2] == [leftovers.lineage, "t"]
    assert len({child, other, leftovers.child(), Leftovers().lineage}) == 4
