"""Asks a model's handler for metadata: a special request to one worker, whose answer becomes part of describe.

The author's handler sees the header `describe: True` and may answer anything; only a JSON object counts as metadata.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from random import getrandbits
from typing import Any

from marserve.errors import (
    HandlerFailed,
    MarserveError,
    NoDescribeRoom,
    NoDescribeWorker,
    NoTicket,
    NoWorker,
    QueueFull,
)
from marserve.messages import Answer, Part, Request
from marserve.pool.pool import Pool
from marserve.telemetry.logs.line_ids import current_ids


class _Waiting:
    """A receiver whose one answer is awaited. Of a stream the first piece counts."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def on_answer(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        self.on_answer(piece)

    def on_error(self, error: MarserveError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


async def ask_for_metadata(
    pool: Pool,
    model: str,
    timeout_s: float,
    within_s: float | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> Answer:
    """The handler's answer to a describe request; body, status and headers are the author's.

    `within_s` is the client's own deadline, in seconds from now. `headers` are the client's; the handler sees them
    without `Authorization`, which holds the key of the management API.

    Raises NoDescribeWorker, NoDescribeRoom, HandlerFailed when no answer came in `timeout_s`, and the errors of any
    request.
    """
    receiver = _Waiting()
    request_id, _, client_id = current_ids().partition("/")
    request = Request(
        id=request_id or str(uuid.uuid4()),
        parts=[Part("body", b"")],
        headers=[line for line in headers if line[0].lower() != b"authorization"],
        server_headers=[("describe", "True")],
        deadline=None if within_s is None else time.monotonic() + within_s,
        is_describe=True,
        key=getrandbits(62) | 1,
        client_id=client_id,
    )
    try:
        job = pool.submit(request, receiver)
    except (QueueFull, NoTicket) as error:
        raise NoDescribeRoom(model, error.cause, retry_after_s=error.retry_after_s) from None
    except NoWorker as error:
        raise NoDescribeWorker(model, retry_after_s=error.retry_after_s) from None
    try:
        async with asyncio.timeout(timeout_s):
            return await receiver.answer
    except TimeoutError:
        raise HandlerFailed("Failed to get customized model metadata.", code=500) from None
    finally:
        job.cancel()


def read_metadata(body: bytes | bytearray) -> dict[str, Any] | None:
    """The JSON object in the handler's answer: `{}` for anything else, None (no metadata) for null."""
    try:
        value = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {}
    if value is None:
        return None
    return value if isinstance(value, dict) else {}


def _refuse(word: str) -> None:
    """Refuse NaN and the infinities, which JSON does not have."""
    raise ValueError(word)
