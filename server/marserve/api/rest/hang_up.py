"""Cancels what a handler of the ASGI application does for a client when the client hangs up.

The connection cancels the job of an inference request itself; a coroutine of the application needs this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from marserve.errors import ClientGone

Result = TypeVar("Result")


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`. If the client goes first: cancel it, wait for its end and raise ClientGone.

    The rest of the request's body is dropped, so the caller must have read what it wants of it.
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
