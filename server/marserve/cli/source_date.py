"""SOURCE_DATE_EPOCH, the time that a reproducible build gives to its files (reproducible-builds.org)."""

from __future__ import annotations

import os

from marserve.errors import CannotArchive


def read_source_date_epoch() -> int | None:
    """The environment's SOURCE_DATE_EPOCH in seconds UTC, None if it is not set. Raises CannotArchive."""
    word = os.environ.get("SOURCE_DATE_EPOCH", "").strip()
    if not word:
        return None
    if not word.isascii() or not word.isdigit():
        raise CannotArchive(f"SOURCE_DATE_EPOCH is {word!r}; it must be a whole number of seconds.")
    return int(word)
