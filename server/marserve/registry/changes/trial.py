"""Tries a version's samples before it takes the place of another one.

Each sample must get an answer of the same shape as the old version's. Then batches must be answered as single requests
are, if the model has that checked. The comparison of shapes is pure; the rest sends requests to pools.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marserve.errors import BadInput, MarserveError
from marserve.messages import Answer, Part, Request
from marserve.pool.checks.certifier import read_samples
from marserve.pool.pool import Pool
from marserve.registry.catalogue.versions import Version

# This many of a model's samples are tried; a check of batches takes more.
MOST_TRIED = 16
NO_SAMPLES = "it has no samples (`samples` of its model-config.yaml), so its answers were not tried before it answered"


class Unfit(Exception):
    """The version failed its trial. `str` is a sentence for the client; `cause` the class of the cause."""

    def __init__(self, why: str, cause: str = "bad_answer") -> None:
        self.cause = cause
        super().__init__(why)


async def read_inputs(version: Version) -> list[list[Part]]:
    """The first samples of a version, if it has any. Raises Unfit if one cannot be read."""
    options, folder = version.facts.options, Path(version.plan.load.model_dir)
    try:
        return await asyncio.to_thread(read_samples, options.samples[:MOST_TRIED], folder)
    except BadInput as error:
        raise Unfit(str(error), "no_samples") from error


async def answers_of(version: Version, inputs: Sequence[list[Part]]) -> list[Answer | None]:
    """The answers of a version that serves to these inputs: None for a failed one."""
    answers: list[Answer | None] = []
    for number, parts in enumerate(inputs):
        try:
            answer = await _ask(version, number, parts)
        except MarserveError:
            answers.append(None)
        else:
            answers.append(answer if answer.status < 400 else None)
    return answers


async def try_out(version: Version, inputs: Sequence[list[Part]], before: Sequence[Answer | None]) -> None:
    """Send a version its samples; `before` are the answers of the old version. Raises Unfit."""
    for number, parts in enumerate(inputs):
        try:
            answer = await _ask(version, number, parts)
        except MarserveError as error:
            raise Unfit(f"sample {number} was not answered: {error}", error.cause or "bad_answer") from error
        if answer.status >= 400:
            raise Unfit(f"sample {number} was answered with status {answer.status}")
        old = before[number] if number < len(before) else None
        if old is not None and (odd := await asyncio.to_thread(find_other_shape, old, answer)) is not None:
            raise Unfit(f"the answer to sample {number} has another shape than before: {odd}", "other_shape")
    options = version.facts.options
    if inputs and options.batch_check != "off" and options.batch_size > 1:
        await _check_batches(version.pool)


async def _check_batches(pool: Pool) -> None:
    try:
        report = await pool.check()
    except MarserveError as error:
        raise Unfit(f"its batches could not be checked: {error}", error.cause or "bad_answer") from error
    if not report["passed"]:
        raise Unfit("batches of its samples are not answered as single requests are", "batch_check")


async def _ask(version: Version, number: int, parts: list[Part]) -> Answer:
    receiver = _Whole(asyncio.get_running_loop().create_future())
    limit_s = version.facts.options.response_timeout_s
    request = Request(f"sample-{number}", parts, deadline=time.monotonic() + limit_s, is_inner=True)
    job = version.pool.submit(request, receiver)
    try:
        return await receiver.outcome
    finally:
        if not receiver.outcome.done() or receiver.outcome.cancelled():
            job.cancel()


class _Whole:
    """A receiver that makes one answer of an answer or a stream's pieces."""

    def __init__(self, outcome: asyncio.Future[Answer]) -> None:
        self.outcome = outcome
        self._first: Answer | None = None
        self._body = bytearray()

    def on_answer(self, answer: Answer) -> None:
        """Keep the whole answer."""
        if not self.outcome.done():
            self.outcome.set_result(answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Collect a piece; the last one ends the answer."""
        first = self._first = self._first or piece
        self._body += piece.body
        if last:
            self.on_answer(Answer(bytes(self._body), first.status, first.reason, first.headers))

    def on_error(self, error: MarserveError) -> None:
        """Keep the error."""
        if not self.outcome.done():
            self.outcome.set_exception(error)


# ---------------------------------------------------------------------------------------------- shapes


def find_other_shape(before: Answer, after: Answer) -> str | None:
    """The first difference in shape between two answers, None without one. Pure.

    JSON answers must have the same members of the same types, and lists with the same type of first element. Numbers,
    texts and lengths may differ, and null matches everything. Otherwise neither answer may be JSON.
    """
    old, new = _json_of(before), _json_of(after)
    if (old is _NO_JSON) != (new is _NO_JSON):
        return "it is no JSON any more" if new is _NO_JSON else "it is JSON, and was none"
    return None if old is _NO_JSON else _differ(old, new, "$")


def _differ(old: Any, new: Any, path: str) -> str | None:
    if old is None or new is None:
        return None
    if _kind(old) != _kind(new):
        return f"{path} is {_kind(new)}, and was {_kind(old)}"
    if isinstance(old, dict):
        for name in old:
            if name not in new:
                return f"{path} has no {name!r:.60} any more"
        for name in new:
            if name not in old:
                return f"{path} has a new {name!r:.60}"
        return next((odd for name in old if (odd := _differ(old[name], new[name], f"{path}.{name:.60}"))), None)
    if isinstance(old, list) and old and new:
        return _differ(old[0], new[0], f"{path}[0]")
    return None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list) else "an object"


_NO_JSON = object()


def _json_of(answer: Answer) -> Any:
    try:
        return json.loads(bytes(answer.body))
    except (ValueError, RecursionError):
        return _NO_JSON
