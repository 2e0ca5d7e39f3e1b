"""How many versions load for the first time at once: each takes a turn, which all its workers share.

Without turns a server that starts with a hundred models would have a hundred processes compute and read from the disk
side by side, and no model would be ready soon. Once a version has been loaded its workers start without a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class FirstLoad:
    """The first load of one version. `turns` has as many permits as versions may load at once; None: any number."""

    def __init__(self, turns: asyncio.Semaphore | None) -> None:
        self._turns = turns
        self._turn: asyncio.Task[bool] | None = None
        self._inside = 0

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the version's turn, and keep it until no worker of the version is inside.

        A body that ends without an error has loaded the model: from then on no worker of the version waits.
        """
        turns = self._turns
        if turns is None:
            yield
            return
        self._inside += 1
        try:
            if self._turn is None:
                self._turn = asyncio.ensure_future(turns.acquire())
            await asyncio.shield(self._turn)
            yield
            self._turns = None
        finally:
            self._inside -= 1
            if not self._inside and self._turn is not None:
                self._give_back(turns, self._turn)
                self._turn = None

    @staticmethod
    def _give_back(turns: asyncio.Semaphore, turn: asyncio.Task[bool]) -> None:
        def release(turn: asyncio.Task[bool]) -> None:
            if not turn.cancelled():
                turns.release()

        turn.cancel()  # does nothing if the turn was taken
        turn.add_done_callback(release)
