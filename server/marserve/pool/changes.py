"""Lets coroutines wait until something about a pool has changed."""

from __future__ import annotations

import asyncio


class Changes:
    """What waits for the next change of one pool. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Return after the next `tell`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def tell(self) -> None:
        """Something has changed: all that wait go on."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
