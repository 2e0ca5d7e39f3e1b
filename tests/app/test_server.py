"""What runs beside a server for its own sake."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import pytest

from marserve.app import server
from marserve.app.tasks import keep

pytestmark = pytest.mark.anyio


async def test_records_that_were_left_out_are_reported_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack that is over is reported, too, although nothing more is logged."""
    monkeypatch.setattr(server, "TELL_EVERY_S", 0.001)
    calls: list[float] = []
    twice = asyncio.Event()

    class Logs:
        def tell_left_out(self, now: float) -> None:
            calls.append(now)
            if len(calls) == 2:
                twice.set()

    async with contextlib.AsyncExitStack() as stack:
        task = keep(stack, server.tell_left_out(cast("Any", Logs())))
        await asyncio.wait_for(twice.wait(), 5)

    assert task.cancelled()
    assert calls[1] > calls[0]
