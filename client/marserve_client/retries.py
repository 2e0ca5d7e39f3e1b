"""Whether a call that failed is tried again, and when. Pure: time and chance are numbers that come in.

A try is repeated only where the server has not run it, or where running it twice is the same:

- no connection came about: nothing was sent, so any call may try again;
- 429 or 503 with `Retry-After`: the server refused before it ran anything. Predictions and changes that can be made
  twice wait as long as it says. Without that header the answer may come from a handler, and is final;
- the connection broke before a byte of an answer: only calls that read.

Registering, swapping, unregistering and beginning a roll-out are never repeated once they were sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from marserve_client.errors import CallFailed, ConnectionLost, NoConnection, Overloaded

Repeat = Literal["reads", "if_refused", "if_unsent", "once"]
"""When a call may come again. `reads`: also after a connection broke, as it changes nothing. `if_refused`: where the
server refused it unseen. `if_unsent`: where no connection came about. `once`: never."""

# This body has killed two workers. Sent again after the pause it would kill the next one.
_NEVER_AGAIN = "refused_fingerprint"


@dataclass(frozen=True)
class Retries:
    """How often a call is tried, and how long it may pause between.

    `tries` counts the first one. After a connection that did not come about the pauses are `first_pause_s`, twice
    that, four times that, each shortened at random by up to a half. A server's `Retry-After` is obeyed up to
    `longest_pause_s`; where it asks for more, the error comes at once and has `retry_after_s`.
    """

    tries: int = 3
    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0

    def __post_init__(self) -> None:
        if self.tries < 1:
            raise ValueError(f"tries is {self.tries}; it must be 1 (no retries) or more.")
        if min(self.first_pause_s, self.longest_pause_s) < 0:
            raise ValueError("first_pause_s and longest_pause_s must be 0 or more seconds.")


NO_RETRIES = Retries(tries=1)


def pause_s(
    retries: Retries, failure: CallFailed, *, number: int, repeat: Repeat, left_s: float | None, chance: float
) -> float | None:
    """How long to wait before the next try; None if there is to be none.

    `number` is that of the try that failed, from 1. `left_s` is what is left of the call's time, None without a bound.
    `chance` is from 0 to 1.
    """
    if number >= retries.tries or repeat == "once":
        return None
    pause = _pause_s(retries, failure, number, repeat, chance)
    if pause is None or (left_s is not None and pause >= left_s):
        return None
    return pause


def _pause_s(retries: Retries, failure: CallFailed, number: int, repeat: Repeat, chance: float) -> float | None:
    growing = min(retries.first_pause_s * 2.0 ** (number - 1), retries.longest_pause_s) * (1 - chance / 2)
    if isinstance(failure, NoConnection):
        return growing
    if isinstance(failure, ConnectionLost):
        return growing if repeat == "reads" and not failure.received_bytes else None
    if isinstance(failure, Overloaded) and failure.retry_after_s is not None and repeat in ("reads", "if_refused"):
        is_obeyed = failure.retry_after_s <= retries.longest_pause_s and failure.cause != _NEVER_AGAIN
        return failure.retry_after_s if is_obeyed else None
    return None
