"""Whether a worker is well by its handler's own word, and when it is to be replaced. Pure.

A worker that fails `STRIKES` checks in a row is to be replaced. If its replacement has never been well either, the next
one is given twice as many, and so on: a check that fails because of something outside must not load models without end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STRIKES = 2
# How often the number is doubled at most.
MOST_DOUBLED = 5

State = Literal["unknown", "well", "failing"]


@dataclass(frozen=True, slots=True)
class HealthView:
    """What describe says: the state, failures in a row, when (UTC, seconds) the last check was, and what it said."""

    state: State
    failures: int
    checked_at: float | None
    reason: str


class WorkerHealth:
    """The health of one worker. `vain` counts the workers before it, in a row, that were never well."""

    __slots__ = ("_has_been_well", "_vain", "checked_at", "failures", "reason")

    def __init__(self, vain: int = 0) -> None:
        self.failures = 0
        self.checked_at: float | None = None
        self.reason = ""
        self._vain = vain
        self._has_been_well = False

    @property
    def strikes(self) -> int:
        """So many failures in a row have it replaced."""
        return STRIKES << (0 if self._has_been_well else min(self._vain, MOST_DOUBLED))

    @property
    def vain_for_heir(self) -> int:
        """The `vain` of the worker that takes its place."""
        return self._vain + 1 if self.failures and not self._has_been_well else 0

    @property
    def view(self) -> HealthView:
        """What describe says."""
        state: State = "failing" if self.failures else "well" if self._has_been_well else "unknown"
        return HealthView(state, self.failures, self.checked_at, self.reason)

    def passed(self, at: float) -> None:
        """A check found the worker well, at this time (UTC)."""
        self.failures, self.reason, self.checked_at = 0, "", at
        self._has_been_well = True

    def failed(self, at: float, reason: str) -> bool:
        """A check did not. Returns whether the worker is to be replaced: then, and after each further failure."""
        self.failures += 1
        self.reason, self.checked_at = reason, at
        return self.failures >= self.strikes
