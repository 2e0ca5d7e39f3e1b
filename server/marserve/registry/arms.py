"""What became of the requests that went to each version, while somebody watches: counts, and how long they took.

A watch stands between a model's requests and its versions only as long as a roll-out lasts; without one nothing here is
called. It sees what traffic chose, not the requests that named their version. No clock of its own but the monotonic
one, and no opinion: `rollout/judge.py` has that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from marserve.errors import ClientError, HandlerFailed, MarserveError
from marserve.messages import Answer, Receiver
from marserve.telemetry.histogram import Histogram

# Each bound is 4 % above the one before: fine enough to tell a p99 from one that is a tenth larger.
LATENCY_BOUNDS = tuple(0.0001 * 1.04**step for step in range(400))


@dataclass(frozen=True, slots=True)
class Seen:
    """What one version did with the requests of a window.

    `errors` were not answered, or with a status from 500 on; `rejections` with one from 400 on. `latency` counts
    requests between `LATENCY_BOUNDS`, one more than there are bounds; those that still run count with the age that they
    have.
    """

    requests: int = 0
    errors: int = 0
    rejections: int = 0
    latency: tuple[int, ...] = ()

    def since(self, before: Seen) -> Seen:
        """What came after `before`, which is an earlier look at the same version."""
        return Seen(
            self.requests - before.requests,
            self.errors - before.errors,
            self.rejections - before.rejections,
            tuple(now - then for now, then in zip(self.latency, before.latency, strict=True))
            if before.latency
            else self.latency,
        )


class Arm:
    """The requests of one version since `restart`. `now` is the monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._running: WeakSet[ArmReceiver] = WeakSet()
        self.restart()

    def restart(self) -> None:
        """Forget what was counted. Requests that run now are counted nowhere."""
        self.errors = 0
        self.rejections = 0
        self._latency = Histogram(LATENCY_BOUNDS)
        self._running = WeakSet()

    def follow(self, receiver: Receiver) -> ArmReceiver:
        """What is to be told of a request's end in the place of `receiver`, which it tells."""
        follower = ArmReceiver(receiver, self, self._now())
        self._running.add(follower)
        return follower

    def refused(self, follower: ArmReceiver, error: MarserveError) -> None:
        """The version did not take the request."""
        self._end(follower, _status_of(error))

    def seen(self) -> Seen:
        """The counts up to now. A client that has left is not counted, once its request is out of the way."""
        now = self._now()
        running = Histogram(LATENCY_BOUNDS)
        ages = [now - follower.began for follower in self._running]
        running.observe_all(ages)
        return Seen(
            self._latency.count + len(ages),
            self.errors,
            self.rejections,
            tuple(ended + runs for ended, runs in zip(self._latency.buckets, running.buckets, strict=True)),
        )

    def _end(self, follower: ArmReceiver, status: int) -> None:
        if follower not in self._running:
            return  # of the window before
        self._running.discard(follower)
        self._latency.observe(max(0.0, self._now() - follower.began))
        if status >= 500:
            self.errors += 1
        elif status >= 400:
            self.rejections += 1


class ArmReceiver:
    """Tells a request's own receiver first, and then the arm that it has ended."""

    __slots__ = ("__weakref__", "_arm", "began", "receiver")

    def __init__(self, receiver: Receiver, arm: Arm, began: float) -> None:
        self.receiver = receiver
        self._arm = arm
        self.began = began

    def on_answer(self, answer: Answer) -> None:
        """The whole answer."""
        self.receiver.on_answer(answer)
        self._arm._end(self, answer.status)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """One piece of a stream; its time ends with the last one."""
        self.receiver.on_piece(piece, last)
        if last:
            self._arm._end(self, 200)

    def on_error(self, error: MarserveError) -> None:
        """No answer, or no rest of it."""
        self.receiver.on_error(error)
        self._arm._end(self, _status_of(error))


def _status_of(error: MarserveError) -> int:
    """Whose fault it was: 400 the client's, 500 the version's. A surface may well say another number."""
    if isinstance(error, ClientError) or (isinstance(error, HandlerFailed) and 400 <= error.code < 500):
        return 400
    return 500
