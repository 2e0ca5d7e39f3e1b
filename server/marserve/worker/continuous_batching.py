"""Continuous batching inside a worker: a call of the handler is a step, after which each answer ends or goes on.

The handler says which: `context.stopping_criteria` holds a callable for each row, which is called with the row's
answer. True: that was the last piece; False: more follows; None, or no criteria: the response header `ts_stream_next`
that the handler set counts, and without that the answer has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marserve_handlers.context import STREAM_HEADER, Context, RequestView


def begin_step(context: Context, items: Sequence[RequestView]) -> None:
    """Point the context at the rows of the next step. Criteria stay until the handler sets new ones (TorchServe)."""
    criteria = context.stopping_criteria
    context.begin_batch(items)
    context.stopping_criteria = criteria


def say_what_follows(context: Context, answers: Sequence[Any]) -> None:
    """Set `ts_stream_next` of each answer. Raises what the criteria raise, IndexError or KeyError if one is missing.

    An exception in the place of an answer ends its row alone.
    """
    if context.is_streaming:
        context.end_stream()  # pieces sent within this step do not mean that a next one follows
    criteria: Any = context.stopping_criteria
    if not criteria:
        return
    for index, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            continue
        has_ended = criteria[index](answer)
        if has_ended is not None:
            context.set_response_header(index, STREAM_HEADER, "false" if has_ended else "true")
