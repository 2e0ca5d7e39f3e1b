"""Runs calls that may hang in a driver in threads of their own, which do not keep the process from ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


def in_own_thread(function: Callable[[], Answer], name: str) -> asyncio.Future[Answer]:
    """Begin `function` in a new thread; the future of the running loop gets what it returns or raises.

    A pool's threads are waited for when the process ends, and one that hangs would keep it for ever.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Answer] = loop.create_future()

    def hand_over(answer: Answer | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)  # type: ignore[arg-type]

    def run() -> None:
        answer: Answer | None = None
        error: BaseException | None = None
        try:
            answer = function()
        except StopIteration as raised:  # which no future takes
            error = RuntimeError(f"StopIteration: {raised}")
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(hand_over, answer, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
