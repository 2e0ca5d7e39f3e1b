"""Which requests of a batch the code that runs now works for: what it logs and prints belongs to these alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

of_this_task: ContextVar[Sequence[Any] | None] = ContextVar("of_this_task", default=None)
"""The requests; None for all of the running batch."""


@contextmanager
def about(items: Sequence[Any]) -> Iterator[None]:
    """What is logged or printed inside belongs to these requests alone."""
    token = of_this_task.set(items)
    try:
        yield
    finally:
        of_this_task.reset(token)
