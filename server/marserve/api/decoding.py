"""Threads for bodies whose decoding would hold the event loop for too long.

A step of the loop is to cost 2 ms at most. Short bodies are decoded on the loop, which is quicker than a change of
threads. Longer bodies, and those that cost much to decode, are decoded here. A decoder that runs here gives the
interpreter's lock away now and then (`breathe`), so that the loop does not wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from marserve.machine.threads import DaemonThreads

Made = TypeVar("Made")

# A body up to this length may be decoded on the loop whatever it holds, unless its decoder has a bound of its own.
SHORT_BYTES: Final = 8 * 1024
# The most inputs of one request: fields of a form, parts, entries of a message.
MAX_PARTS: Final = 1024
# Two, so that one large body does not hold up all others. More would take processors from the loop.
THREADS: Final = 2


class Decoding:
    """The threads of one server. Used on one event loop; the owner calls `close` when no request is under way."""

    def __init__(self, *, ready_threads: int = 0) -> None:
        """`ready_threads` are begun at once, the others when a body needs them."""
        self._threads = DaemonThreads(THREADS, "decoding", ready=ready_threads)

    def begin(self, decode: Callable[..., Made], *given: Any) -> asyncio.Future[Made]:
        """Have a thread call `decode`; cancelling the future takes back a call that has not begun."""
        return asyncio.get_running_loop().run_in_executor(self._threads, decode, *given)

    async def run(self, length: int, decode: Callable[..., Made], *given: Any) -> Made:
        """What `decode` makes of `length` bytes, on the loop if they are few, else in a thread. Raises its errors."""
        if length <= SHORT_BYTES:
            return decode(*given)
        return await self.begin(decode, *given)

    def close(self) -> None:
        """End the threads; calls that have not begun are dropped."""
        self._threads.shutdown(cancel_futures=True)


def breathe() -> None:
    """Let another thread have the interpreter's lock. For decoders, between two slices of a long body."""
    time.sleep(0)
