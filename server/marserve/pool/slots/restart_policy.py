"""When a worker that ended is started again. Pure: failures, exit statuses and times in, a delay out.

A worker that has answered since its start is replaced at once: its death says nothing of the next one. From the
second failure in a row TorchServe's delays apply (contract 10.4), while less than `max_retry_timeout_s` has passed
since the first of the row, and while the row is no longer than `max_restarts`. Then the slot is given up, and tried
again every `retry_failed_every_s`. After an exit with one of `no_restart_exit_codes` another try has no point: the slot
is given up until an operator scales or registers the model again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from marserve.pool.options import PoolOptions

RETRY_DELAYS_S = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)


@dataclass(frozen=True, slots=True)
class Restart:
    """When to start again: after `delay_s`, infinite for not by itself. `gave_up`: until then the slot has failed."""

    delay_s: float
    gave_up: bool = False


NEVER = Restart(math.inf, gave_up=True)


class RestartPolicy:
    """The restarts of one worker slot."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self._failures = 0
        self._row_began: float | None = None

    def loaded(self) -> None:
        """The worker loaded its model: the row's clock stops, as in TorchServe; the count goes on until an answer."""
        self._row_began = None

    def answered(self) -> None:
        """The worker has answered since its start: the row of failures is over."""
        self._failures = 0
        self._row_began = None

    def ended(self, now: float, exit_code: int | None = None) -> Restart:
        """The worker ended, or failed to start, at `now`. `exit_code` is None unless it exited by itself."""
        options = self._options
        if exit_code in options.no_restart_exit_codes:
            return NEVER
        if self._row_began is None:
            self._row_began = now
        self._failures += 1
        if 0 < options.max_restarts < self._failures:
            return Restart(options.retry_failed_every_s, gave_up=True)
        if self._failures == 1 and options.max_retry_timeout_s > 0:
            return Restart(0.0)
        delay = float(RETRY_DELAYS_S[min(self._failures - 2, len(RETRY_DELAYS_S) - 1)]) if self._failures > 1 else 0.0
        if now + delay - self._row_began >= options.max_retry_timeout_s:
            return Restart(options.retry_failed_every_s, gave_up=True)
        return Restart(delay)
