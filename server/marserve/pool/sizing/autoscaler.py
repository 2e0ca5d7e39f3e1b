"""Decides how many workers a version should have, between its least and its most. Pure: time is passed in.

Up: when for `UP_AFTER_S` without a break the oldest waiting request has waited too long (`TOO_LONG_S`, or one and a
half batches, whichever is longer); by half as many workers again, once no worker is starting. The machine must keep
`MEMORY_MARGIN` of the memory that is available now, and `MEMORY_LEAST_BYTES`.

Down: by one worker at a time, when for `DOWN_AFTER_S` no request waited too long and the remaining workers would be
busy at most `DOWN_BELOW` of their time. If a step down has to be taken back soon, the wait for the next one doubles.

To nothing: if the least number is 0 and an idle time-out is set, after that long without a request; the first request
starts workers again. After the time-out once more the template may end, too.

The autoscaler knows no workers and no queue, only an `Observation` of them; the caller carries the `Decision` out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from marserve.pool.options import PoolOptions

TOO_LONG_S = 0.1
BATCHES_TOO_LONG = 1.5
UP_AFTER_S = 0.5
UP_PAUSE_S = 1.0
DOWN_AFTER_S = 30.0
DOWN_BELOW = 0.6
MAX_DOWN_AFTER_S = 600.0
BUSY_OVER_S = 10.0
MEMORY_MARGIN = 0.1
MEMORY_LEAST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a version. Times in seconds.

    `waiting` and `running` are requests, the oldest waiting one came `oldest_wait_s` ago; `ready`, `busy`, `starting`
    and `failed` (gave up, or failed to load) are workers; a batch takes about `batch_s`. The machine has
    `bytes_available` of memory, and one more worker takes about `bytes_per_worker`; None for unknown.
    """

    waiting: int
    running: int
    oldest_wait_s: float
    ready: int
    busy: int
    starting: int
    failed: int
    batch_s: float = 0.0
    bytes_available: int | None = None
    bytes_per_worker: int | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers there should be, and the reason in words."""

    target: int
    reason: str


class Autoscaler:
    """Decides the number of workers of one version."""

    def __init__(self, options: PoolOptions) -> None:
        self.minimum = options.min_workers
        self.maximum = max(options.min_workers, options.max_workers)
        self.idle_timeout_s = options.idle_timeout_s
        self._least_awake = max(1, options.least_awake)
        self.target = options.min_workers
        self.reason = "the least number" if options.min_workers else "asleep: no request so far"
        self._changed_at = -math.inf
        self._too_long_since: float | None = None
        self._calm_since: float | None = None
        self._used_at: float | None = None
        self._down_at = -math.inf
        self._down_after_s = DOWN_AFTER_S
        self._busy = 0.0
        self._seen_at: float | None = None

    @property
    def may_sleep(self) -> bool:
        """Whether the version may be without workers while no requests come."""
        return self.minimum == 0 and self.maximum > 0 and self.idle_timeout_s is not None

    @property
    def least_awake(self) -> int:
        """The least number of workers while requests come."""
        return min(self.maximum, self._least_awake) if self.may_sleep else self.minimum

    def resume(self, now: float) -> None:
        """Forget old measurements: the pool was at rest and not observed for a while."""
        self._seen_at = None
        self._too_long_since = None
        self._calm_since = now
        self._used_at = now

    def wake(self, now: float) -> Decision | None:
        """A request came. The decision if no worker is wanted so far; else None."""
        self._used_at = now
        if self.target == 0 and self.may_sleep:
            return self._change(self.least_awake, "woken by a request", now)
        return None

    def sleep(self, now: float, reason: str) -> Decision | None:
        """The version is put to sleep. The decision if it has workers; else None."""
        return self._change(0, reason, now) if self.target and self.may_sleep else None

    def decide(self, now: float, seen: Observation) -> Decision | None:
        """What should change now, or None. Call it at regular intervals while the pool is not at rest."""
        self._measure(now, seen)
        if self.target == 0:
            return None
        if self.may_sleep and self._is_idle_for(now, self.idle_timeout_s or 0.0):
            return self._change(0, f"asleep: no request for {self.idle_timeout_s:g} s", now)
        too_long_s = max(TOO_LONG_S, BATCHES_TOO_LONG * seen.batch_s)
        if seen.waiting and seen.oldest_wait_s >= too_long_s:
            self._calm_since = None
            if self._too_long_since is None:
                self._too_long_since = now
            if now - self._too_long_since >= UP_AFTER_S:
                return self._up(now, seen, too_long_s)
            return None
        self._too_long_since = None
        if self._calm_since is None:
            self._calm_since = now
        return self._down(now)

    def may_drop_template(self, now: float) -> bool:
        """Whether it has slept so long that its template may end, so that the next request waits for a load."""
        return self.target == 0 and self._is_idle_for(now, 2 * (self.idle_timeout_s or 0.0))

    def _measure(self, now: float, seen: Observation) -> None:
        if seen.waiting or seen.running or self._used_at is None:
            self._used_at = now
        if self._seen_at is None:
            self._busy = float(seen.busy)
        else:
            weight = 1.0 - math.exp(-max(0.0, now - self._seen_at) / BUSY_OVER_S)
            self._busy += weight * (seen.busy - self._busy)
        self._seen_at = now

    def _is_idle_for(self, now: float, seconds: float) -> bool:
        return self._used_at is not None and now - self._used_at >= seconds

    def _up(self, now: float, seen: Observation, too_long_s: float) -> Decision | None:
        if self.target >= self.maximum:
            self.reason = f"the most that is allowed, though requests wait {seen.oldest_wait_s:.2g} s"
            return None
        if seen.failed:
            self.reason = f"no more, while {seen.failed} cannot load the model"
            return None
        if seen.starting or now - self._changed_at < UP_PAUSE_S:
            return None
        wanted = min(self.maximum, self.target + max(1, self.target // 2))
        wanted = min(wanted, self.target + _room(seen))
        if wanted <= self.target:
            self.reason = (
                f"no more: a worker takes about {_mib(seen.bytes_per_worker)} MiB, and of "
                f"{_mib(seen.bytes_available)} MiB some must stay free"
            )
            return None
        if now - self._down_at < 2 * self._down_after_s:
            self._down_after_s = min(MAX_DOWN_AFTER_S, 2 * self._down_after_s)
        return self._change(wanted, f"requests wait {seen.oldest_wait_s:.2g} s, more than {too_long_s:.2g} s", now)

    def _down(self, now: float) -> Decision | None:
        if self.target <= self.least_awake or self._calm_since is None:
            return None
        since = max(self._calm_since, self._changed_at)
        fewer = self.target - 1
        if now - since < self._down_after_s or self._busy > DOWN_BELOW * fewer:
            return None
        self._down_at = now
        return self._change(fewer, f"on average {self._busy:.1f} of {self.target} workers were busy", now)

    def _change(self, target: int, reason: str, now: float) -> Decision:
        self.target, self.reason = target, reason
        self._changed_at = now
        self._too_long_since = None
        return Decision(target, reason)


def _room(seen: Observation) -> int:
    """How many more workers the memory has room for; a huge number if unknown."""
    if seen.bytes_available is None or not seen.bytes_per_worker:
        return 1 << 30
    free = seen.bytes_available - max(MEMORY_LEAST_BYTES, int(MEMORY_MARGIN * seen.bytes_available))
    return max(0, free // seen.bytes_per_worker)


def _mib(size_bytes: int | None) -> int:
    return (size_bytes or 0) // (1024 * 1024)
