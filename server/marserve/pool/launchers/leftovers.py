"""Ends what workers and templates leave behind when they end: processes that have left their process group.

The search through all processes takes milliseconds. It is done in a thread, once for all requests that come at about
the same time. `lineage.py` says how a process is recognised.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys

from marserve.lineage import end_families

log = logging.getLogger("marserve.pool.launchers")


class Leftovers:
    """The leftovers of one server. `lineage` is the first word of the lineage of every process that it starts."""

    def __init__(self) -> None:
        self.lineage = secrets.token_hex(8)
        self._asked: dict[str, int] = {}
        self._next: asyncio.Future[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    def child(self, *words: str) -> str:
        """A lineage below the server's and these words; its last word is new."""
        return "/".join((self.lineage, *words, secrets.token_hex(8)))

    async def end(self, lineage: str, page_inode: int = 0) -> None:
        """End the processes of a lineage whose owner has ended, and wait until they are gone."""
        asked = self.ask(lineage, page_inode)
        if asked is not None:
            await asyncio.shield(asked)

    def ask(self, lineage: str, page_inode: int = 0) -> asyncio.Future[None] | None:
        """As `end`, without waiting: the future is done when they are gone. None if the system shows no lineages."""
        if sys.platform != "linux":
            return None
        self._asked[lineage] = page_inode
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        asked = self._next
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        return asked

    async def _look(self) -> None:
        while self._next is not None:
            asked, self._asked = self._asked, {}
            gone, self._next = self._next, None
            try:
                ended = await asyncio.to_thread(end_families, asked)
                if ended:
                    log.info("ended what a worker had left behind: processes %s", ", ".join(map(str, sorted(ended))))
            except Exception:
                log.exception("what workers left behind could not be looked for")
            finally:
                if not gone.done():
                    gone.set_result(None)
        self._looking = None
