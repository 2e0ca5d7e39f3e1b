"""Which requests a line of the server's own logging belongs to.

`about_request` names them for the code that runs inside it, tasks and threads begun there included. A task that goes on
after the request is over, as a worker that a registration has started, logs without its id from then on. A call that
logs outside of such code says the ids with `extra` (`log_limit.caused_by`, `belongs_to`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# The names of a record's attributes: its ids, and a traceback of another process as text.
IDS = "line_ids"
TRACEBACK = "traceback_text"


class _About:
    """The ids, as `messages.line_ids` writes them; empty once the request is over."""

    __slots__ = ("ids",)

    def __init__(self, ids: str) -> None:
        self.ids = ids


_about: ContextVar[_About | None] = ContextVar("about_request", default=None)


@contextmanager
def about_request(ids: str) -> Iterator[None]:
    """Lines that are logged inside belong to these requests."""
    about = _About(ids)
    token = _about.set(about)
    try:
        yield
    finally:
        about.ids = ""
        _about.reset(token)


def belongs_to(ids: str) -> dict[str, str]:
    """For `extra` of a log call: the record belongs to these requests."""
    return {IDS: ids}


def with_traceback(traceback: str, ids: str = "") -> dict[str, str]:
    """For `extra` of a log call: the record has this traceback of another process, and belongs to these requests."""
    extra = {TRACEBACK: traceback} if traceback else {}
    return extra | belongs_to(ids) if ids else extra


def current_ids() -> str:
    """The ids that lines logged here get; empty outside of `about_request`."""
    about = _about.get()
    return "" if about is None else about.ids


def ids_of(record: logging.LogRecord) -> str:
    """The ids of the requests that a record belongs to, empty without any. Called in the context of the log call."""
    ids = getattr(record, IDS, None)
    if isinstance(ids, str):
        return ids
    return current_ids()
