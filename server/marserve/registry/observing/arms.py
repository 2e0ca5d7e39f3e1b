"""Counts how the requests of each version ended and how long they took, while a roll-out compares two versions.

An arm stands between a model's requests and a version only as long as a roll-out lasts; without one nothing here is
called. It does not see requests that named their version. Its only clock is the monotonic one. It judges nothing:
`rollout/judge.py` does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from msgspec.structs import replace

from marserve.errors import ClientError, HandlerFailed, MarserveError, OutOfMemory, Unavailable, WorkerDied
from marserve.messages import Accepted, Answer, Receiver, Request
from marserve.pool.pool import Pool
from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.timeline import BatchTimes, times_of

# Each bound is 4 % above the one before: fine enough to tell a p99 from one that is a tenth larger.
LATENCY_BOUNDS = tuple(0.0001 * 1.04**step for step in range(400))


@dataclass(frozen=True, slots=True)
class Seen:
    """How the requests of one version in a window ended.

    `errors` were not answered, or with a status from 500 on; `rejections` with a status of 400 to 499. `latency` counts
    requests between `LATENCY_BOUNDS`, and has one count more than there are bounds; a running request counts with its
    age.
    """

    requests: int = 0
    errors: int = 0
    rejections: int = 0
    latency: tuple[int, ...] = ()

    def since(self, before: Seen) -> Seen:
        """The counts since `before`, an earlier look at the same version."""
        return Seen(
            self.requests - before.requests,
            self.errors - before.errors,
            self.rejections - before.rejections,
            tuple(now - then for now, then in zip(self.latency, before.latency, strict=True))
            if before.latency
            else self.latency,
        )


class Arm:
    """The requests of one version since `restart`. `now` is the monotonic clock.

    `rescue` has another version answer a request that this one could not run to its end: its worker died, or it took no
    request. A rescued request still counts as an error of this version.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        rescue: Callable[[Request, Receiver], Accepted] | None = None,
    ) -> None:
        self._now = now
        self._rescue = rescue
        self._running: WeakSet[ArmReceiver] = WeakSet()
        self.restart()

    def restart(self) -> None:
        """Reset the counts. Requests that run now are not counted."""
        self.errors = 0
        self.rejections = 0
        self._latency = Histogram(LATENCY_BOUNDS)
        self._running = WeakSet()

    def submit(self, pool: Pool, request: Request, receiver: Receiver) -> Accepted:
        """Hand a request to the version's pool, and follow it. Raises as the pool, unless the request is rescued."""
        follower = ArmReceiver(request, receiver, self, self._now())
        self._running.add(follower)
        try:
            job = pool.submit(request if self._rescue is None else replace(request, is_rescued=True), follower)
        except MarserveError as error:
            self._end(follower, _status_of(error))
            rescued = self._try_rescue(request, receiver, error)
            if rescued is None:
                raise
            return rescued
        if self._rescue is None:
            return job
        follower.job = job
        return follower

    def _try_rescue(self, request: Request, receiver: Receiver, error: MarserveError) -> Accepted | None:
        if self._rescue is None or not isinstance(error, WorkerDied | OutOfMemory | Unavailable):
            return None
        try:
            return self._rescue(request, receiver)
        except MarserveError:
            return None  # the caller raises the first error

    def seen(self) -> Seen:
        """The counts up to now. A request whose client left is not counted any more once its job has ended."""
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

    @property
    def ended(self) -> dict[str, int]:
        """How many requests have ended since `restart`, by how: `answered`, `rejected`, `failed`."""
        rejected, failed = self.rejections, self.errors
        return {
            "answered": self._latency.count - rejected - failed,
            "rejected": rejected,
            "failed": failed,
        }

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
    """Counts the end of a request and passes everything on to the request's own receiver.

    For a request that may be rescued it also stands for the job, in whichever version that runs.
    """

    __slots__ = (
        *("__weakref__", "_arm", "_has_failed", "_is_cancelled", "_is_streaming"),
        *("began", "job", "receiver", "request"),
    )

    def __init__(self, request: Request, receiver: Receiver, arm: Arm, began: float) -> None:
        self.receiver = receiver
        self.began = began
        self.job: Accepted | None = None
        self.request = request
        self._arm = arm
        self._is_streaming = False
        self._has_failed = False
        self._is_cancelled = False

    def on_answer(self, answer: Answer) -> None:
        """Pass on the whole answer."""
        self.receiver.on_answer(answer)
        self._arm._end(self, answer.status if answer.thrown is None else 500)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Pass on one piece of a stream. The request's time ends with the last; one may tell a failure."""
        self._is_streaming = True
        self._has_failed = self._has_failed or piece.thrown is not None
        self.receiver.on_piece(piece, last)
        if last:
            self._arm._end(self, 500 if self._has_failed else 200)

    def on_error(self, error: MarserveError) -> None:
        """Rescue the request, or pass on the error that ends it."""
        self._arm._end(self, _status_of(error))
        if not self._is_streaming and not self._is_cancelled:
            rescued = self._arm._try_rescue(self.request, self.receiver, error)
            if rescued is not None:
                self.job = rescued
                return
        self.receiver.on_error(error)

    def cancel(self) -> None:
        """Cancel the job, because the client has left."""
        self._is_cancelled = True
        if self.job is not None:
            self.job.cancel()

    def hold(self) -> None:
        """Hold the job's pieces, because the client reads too slowly."""
        if self.job is not None:
            self.job.hold()

    def resume(self) -> None:
        """Send the job's pieces again."""
        if self.job is not None:
            self.job.resume()

    @property
    def arrived(self) -> float:
        """When it came, as `Job.arrived`."""
        return self.began

    @property
    def times(self) -> BatchTimes | None:
        """The last batch in which it went to a worker."""
        return times_of(self.job)

    @property
    def keeps_the_only_worker(self) -> bool:
        """Whether it was cancelled, and the version's only worker still runs it."""
        return self.job is not None and self.job.keeps_the_only_worker


def _status_of(error: MarserveError) -> int:
    """400 for the client's fault, 500 for the version's. The status that a surface sends may be another."""
    if isinstance(error, ClientError) or (isinstance(error, HandlerFailed) and 400 <= (error.code or 500) < 500):
        return 400
    return 500
