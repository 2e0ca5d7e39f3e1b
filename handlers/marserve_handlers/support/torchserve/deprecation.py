"""Marks functions that will go away."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that goes away in `version`: each call warns with `klass` and names the replacement."""

    def mark(func: Callable[P, R]) -> Callable[P, R]:
        hint = f"; use {replacement} instead" if replacement else ""
        message = f"{func.__name__} goes away in version {version}{hint}"

        @functools.wraps(func)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            warnings.warn(message, klass, stacklevel=2)
            return func(*args, **kwargs)

        return run

    return mark
