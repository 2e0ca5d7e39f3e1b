"""Turns of the event loop: what a test waits for where no event says that all is done that can be done."""

from __future__ import annotations

import asyncio


async def let_all_run() -> None:
    """Let the loop do all that is due now."""
    for _ in range(10):
        await asyncio.sleep(0)
