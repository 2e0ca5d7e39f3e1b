"""Gives up calls in threads that a file system does not answer, once the server is to end.

A task that waits for such a call (a registration, the start itself) gets an error that names it, so that the server
ends in order. A call that began after the signal has as much time as the end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from marserve.app.draining import Stop
from marserve.errors import CallHangs
from marserve.machine.hanging import Stillness, describe_call
from marserve.machine.threads import DaemonThreads

log = logging.getLogger("marserve.app")

LOOK_EVERY_S = 0.25
# A call may hang for so long.
STILL_S = 5.0
# During the start, nothing yet has to end in order.
STILL_AT_START_S = 1.0


async def give_up_hanging(threads: DaemonThreads, stop: Stop, is_up: asyncio.Event) -> None:
    """Wait for the request to end, then give up hanging calls; never returns."""
    await stop.asked.wait()
    asked = time.monotonic()
    limit_s = STILL_S if is_up.is_set() else STILL_AT_START_S
    stillness = Stillness()
    given_up: set[int] = set()
    while True:
        before = [thread for thread, began in threads.calls().items() if began <= asked]
        for thread, seconds in stillness.look(before, time.monotonic()).items():
            if seconds >= limit_s and thread not in given_up:
                given_up.add(thread)
                what = describe_call(thread)
                names = {each.ident: each.name for each in threading.enumerate()}
                log.error("Thread %s hangs, and what waits for it is given up: %s", names.get(thread, thread), what)
                threads.give_up(thread, CallHangs(what, limit_s))
        await asyncio.sleep(LOOK_EVERY_S)
