"""When a worker that ended is started again. Pure: failures and times in, a delay out.

A worker that has answered since its start is replaced at once: its death says nothing of the next one. From the
second failure in a row TorchServe's delays apply (contract 10.4), while less than `max_retry_timeout_s` has passed
since the first of the row. Then the slot is given up, and tried again every `retry_failed_every_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

RETRY_DELAYS_S = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)


@dataclass(frozen=True, slots=True)
class Restart:
    """What to do: start again after `delay_s`. `gave_up`: until then the slot counts as failed."""

    delay_s: float
    gave_up: bool = False


class RestartPolicy:
    """The restarts of one worker slot."""

    def __init__(self, *, max_retry_timeout_s: float, retry_failed_every_s: float) -> None:
        self._max_retry_timeout_s = max_retry_timeout_s
        self._retry_failed_every_s = retry_failed_every_s
        self._failures = 0
        self._row_began: float | None = None

    def loaded(self) -> None:
        """The worker loaded its model: the clock of the row stops, as in TorchServe; the count waits for an answer."""
        self._row_began = None

    def answered(self) -> None:
        """The worker has answered since its start: the row of failures is over."""
        self._failures = 0
        self._row_began = None

    def ended(self, now: float) -> Restart:
        """The worker ended, or failed to start, at `now`."""
        if self._row_began is None:
            self._row_began = now
        self._failures += 1
        if self._failures == 1 and self._max_retry_timeout_s > 0:
            return Restart(0.0)
        delay = float(RETRY_DELAYS_S[min(self._failures - 2, len(RETRY_DELAYS_S) - 1)]) if self._failures > 1 else 0.0
        if now + delay - self._row_began >= self._max_retry_timeout_s:
            return Restart(self._retry_failed_every_s, gave_up=True)
        return Restart(delay)
