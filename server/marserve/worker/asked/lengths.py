"""How long items are: calls the author's `length_of` for one item after the other, within a time limit.

An exception concerns its item alone; the first one is written to the model log, further ones are only counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from marserve.messages import AskLengths, Lengths
from marserve.worker.load import LoadedModel
from marserve.worker.outgoing import say
from marserve.worker.rows import rows_of

FAILED = -1
MAX_LENGTH = 1 << 40


def read_lengths(model: LoadedModel, ask: AskLengths, bodies: Sequence[bytearray]) -> Lengths:
    """Ask the handler for the length of each item until the time is up; at least one is asked for."""
    lengths: list[int] = []
    began = time.monotonic()
    for row in rows_of(ask.items, bodies, model.load.decode_input):
        lengths.append(_length(model, row))
        if time.monotonic() - began >= ask.limit_s:
            break
    return Lengths(ask.number, time.monotonic() - began, lengths)


def _length(model: LoadedModel, row: dict[str, Any]) -> int:
    assert model.length_of is not None
    try:
        length = model.length_of(row)
        if isinstance(length, bool) or int(length) != length or not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length_of() said {length!r}; it must say a whole number from 0 to {MAX_LENGTH}")
        return int(length)
    except SystemExit:
        raise
    except BaseException as error:  # the author's code
        if not model.has_failed_length:
            model.has_failed_length = True
            say(logging.WARNING, "the handler could not say how long an item is; its length is estimated", error=error)
        return FAILED
