"""Which requests a line of the server's own logging belongs to."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from marserve.telemetry.logs.line_ids import about_request, belongs_to, current_ids, ids_of


def record(extra: dict[str, Any] | None = None) -> logging.LogRecord:
    """A record of a log call with this `extra`."""
    return logging.getLogger("x").makeRecord("x", logging.INFO, "f", 1, "text", (), None, extra=extra)


def test_what_a_call_says_has_precedence() -> None:
    """Over what it runs in."""
    with about_request("a"):
        assert ids_of(record()) == "a"
        assert ids_of(record(belongs_to("b"))) == "b"
    assert ids_of(record()) == ""


def test_a_task_that_outlives_its_request_loses_the_id() -> None:
    """A registration starts workers that log for days."""

    async def play() -> tuple[str, str]:
        over = asyncio.Event()

        async def go_on() -> tuple[str, str]:
            while_it_ran = current_ids()
            await over.wait()
            return while_it_ran, current_ids()

        with about_request("a"):
            task = asyncio.create_task(go_on())
            await asyncio.sleep(0)
        over.set()
        return await task

    assert asyncio.run(play()) == ("a", "")


def test_requests_side_by_side_do_not_mix() -> None:
    """Each task has its own."""

    async def ask(name: str) -> str:
        with about_request(name):
            await asyncio.sleep(0)
            return current_ids()

    async def play() -> list[str]:
        return await asyncio.gather(ask("a"), ask("b"))

    assert asyncio.run(play()) == ["a", "b"]
