"""Ends what is done for a client when the client hangs up, for handlers of the ASGI application. No policy.

The connection class tells an inference request's job itself; a coroutine of the application hears of it only here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from marserve.errors import ClientGone

Result = TypeVar("Result")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; cancel it, wait for its end and raise ClientGone when the client goes first.

    The request's body must have been read, or not be wanted: what still comes of it is dropped.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait((working, gone))


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
