"""Lets coroutines wait until something has changed: about a pool, or about the models of a registry."""

from __future__ import annotations

import asyncio


class Changes:
    """What waits for the next change. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiters)

    async def wait(self) -> None:
        """Return after the next `tell`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def tell(self) -> None:
        """Something has changed: all that wait go on."""
        if self._waiters:
            waiters, self._waiters = self._waiters, set()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
