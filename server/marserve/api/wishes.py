"""Reads what a client may ask for besides its input: a deadline, a priority, a version. For all surfaces. Pure.

The names are those of headers over HTTP, and of metadata over gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from marserve.errors import BadInput

TIMEOUT: Final = "x-marserve-timeout-ms"
PRIORITY: Final = "x-marserve-priority"
VERSION: Final = "x-marserve-version"

# The longest relative deadline: 31 bits of milliseconds, about 25 days.
MAX_TIMEOUT_MS: Final = 2**31 - 1

# As long as a version in a path may be.
MAX_VERSION_BYTES: Final = 8 * 1024

_DIGITS = re.compile(rb"[0-9]{1,10}").fullmatch


class Wishes(NamedTuple):
    """What one request asks for; None for what it does not. `asked_version` is a version or a label."""

    timeout_s: float | None = None
    priority: int | None = None
    asked_version: str | None = None

    def adding(self, name: str, value: bytes, where: str = "request") -> Wishes:
        """These, and the wish `name` of `READERS`. Raises BadInput for a wrong value, and for a second one."""
        field, read = READERS[name]
        if getattr(self, field) is not None:
            raise BadInput(f"{name} stands in the {where} more than once; it must stand there once.")
        return self._replace(**{field: read(value)})


NO_WISHES: Final = Wishes()


def read_timeout_s(value: bytes) -> float:
    """The value of `x-marserve-timeout-ms`, in seconds. Raises BadInput."""
    if _DIGITS(value) and 1 <= (milliseconds := int(value)) <= MAX_TIMEOUT_MS:
        return milliseconds / 1000
    raise BadInput(f"{TIMEOUT} is {_show(value)}; it must be a whole number of milliseconds, 1 to {MAX_TIMEOUT_MS}.")


def read_version(value: bytes) -> str:
    """The value of `x-marserve-version`: a version or a label, percent-encoded where it is not plain text.

    Raises BadInput for an empty one, and for one that is too long.
    """
    if len(value) > MAX_VERSION_BYTES:
        raise BadInput(f"{VERSION} has {len(value)} bytes; it may have {MAX_VERSION_BYTES}.")
    if not value.strip():
        raise BadInput(f"{VERSION} is empty; it must name a version of the model, or a label.")
    return unquote(value.strip().decode("latin-1"), errors="replace")


def read_priority(value: bytes) -> int:
    """The value of `x-marserve-priority`. Raises BadInput."""
    if len(value) == 1 and value.isdigit():
        return int(value)
    raise BadInput(f"{PRIORITY} is {_show(value)}; it must be a whole number from 0 (most urgent) to 9.")


def _show(value: bytes) -> str:
    """The client's own value, bounded and quoted for a sentence."""
    text = value.decode("latin-1")
    return repr(text if len(text) <= 40 else text[:40] + "...")


READERS: Final[dict[str, tuple[str, Callable[[bytes], Any]]]] = {
    TIMEOUT: ("timeout_s", read_timeout_s),
    PRIORITY: ("priority", read_priority),
    VERSION: ("asked_version", read_version),
}
