"""Mirrors a share of a model's requests to another version, and compares its answers with those that clients got.

The client's answer goes out first. Only then a copy of the request is sent, with the lowest priority and within bounds
of number and bytes. A copy beyond the bounds is dropped and counted. No request waits for anything here, and no client
sees the error of a copy. Answers that must be equal byte for byte are compared here. If numbers may differ, or the
handler compares, a worker of the shadow version does it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from marserve.errors import MarserveError, NoWorker, WaitTooLong
from marserve.messages import Accepted, Answer, Receiver, Request
from marserve.pool.checks.certifier import MOST_PAIRS
from marserve.pool.dispatch.queue import LEAST_URGENT
from marserve.pool.pool import Pool
from marserve.registry.observing.proportions import lowest_rate
from marserve.registry.observing.shadow_spec import ShadowSpec
from marserve.registry.observing.yielding import Yielding

log = logging.getLogger("marserve.registry")

# The bytes that all copies, their requests and both answers may hold in memory.
MOST_BYTES = 64 * 1024 * 1024
# The deadline of a copy.
COPY_LIMIT_S = 60.0
# The doubt that is left about the agreement that is shown.
DOUBT: Final = 0.05
# Of the differing answers this many of the first and this many of the latest are kept.
KEPT_SAMPLES = 10
# The length of a body that is shown.
SHOWN_BYTES = 2000


@dataclass(slots=True)
class Counts:
    """How the requests that were chosen to be mirrored ended.

    `mirrored` were sent to the shadow; of these `compared` were answered and compared, and `differing` of them
    differed. `dropped` were beyond a bound: `busy` (too many copies, or requests that wait) or `memory`. `skipped`
    cannot be compared: `streamed`, `failed` (the client got an error), `no_version`, `shared_memory` (the client's, for
    its tensors). `errors` are copies without an answer, by cause, and failed comparisons (`comparison`). Of scores
    `error` and `magnitude` are the sums of all differences and of what clients got.
    """

    mirrored: int = 0
    compared: int = 0
    differing: int = 0
    error: float = 0.0
    magnitude: float = 0.0
    dropped: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    skipped: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class Shadow:
    """The shadow of one model. All methods run on the event loop's thread and raise nothing.

    `is_stopped`: it mirrors no further requests.
    """

    def __init__(
        self,
        spec: ShadowSpec,
        find_pool: Callable[[], Pool | None],
        has_own_requests: Callable[[], bool],
        *,
        draw: Callable[[], float] = random.random,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`find_pool` returns the pool of the shadow version as it is registered now, None while it is not.

        `has_own_requests` says whether clients that name no version may get its answers; its workers then must not
        yield.
        """
        self.spec = spec
        self.counts = Counts()
        self.last_error = ""
        self._find_pool = find_pool
        self._draw = draw
        self._most_bytes = most_bytes
        self._began = time.time()
        self._copies: set[_Copy] = set()
        self._bytes = 0
        self._waiting: deque[tuple[_Copy, Answer]] = deque()
        self._comparing: asyncio.Task[None] | None = None
        self._first: list[dict[str, Any]] = []
        self._latest: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self.is_stopped = False
        self._yielding = Yielding(find_pool, has_own_requests)

    def follow(self, request: Request, receiver: Receiver) -> Receiver:
        """The receiver for a request's answer: `receiver`; for a share of requests one that also mirrors them."""
        if request.is_describe or self.is_stopped or self._draw() >= self.spec.share:
            return receiver
        if request.shares_memory:  # a copy would read what has changed since, and write into it
            self.skip("shared_memory")
            return receiver
        return _Primary(receiver, request, self)

    def start(self) -> None:
        """Have the shadow's workers yield to others, if the system lets the server undo that."""
        self._yielding.start()

    def look_at_traffic(self) -> None:
        """Look whether the shadow has requests of its own now, as the model's traffic has changed."""
        self._yielding.look()

    def stop_now(self) -> None:
        """Stop mirroring; copies under way are cancelled."""
        self.is_stopped = True
        for copy in list(self._copies):
            copy.cancel()
        self._waiting.clear()
        self._yielding.stop()
        if self._comparing is not None:
            self._comparing.cancel()

    async def wait_until_stopped(self) -> None:
        """After `stop_now`: wait for a comparison under way."""
        if self._comparing is not None:
            await asyncio.wait([self._comparing])

    def describe(self) -> dict[str, Any]:
        """The spec, the counts since the begin, and the kept differences."""
        counts = self.counts
        document = {
            **self.spec.document(),
            "began": self._began,
            "ready": (pool := self._find_pool()) is not None and pool.ready_workers > 0,
            "yields": self._yielding.is_yielding,
            "mirrored": counts.mirrored,
            "compared": counts.compared,
            "differing": counts.differing,
            "shownAgreement": lowest_rate(counts.compared - counts.differing, counts.compared, DOUBT),
            "dropped": dict(counts.dropped),
            "skipped": dict(counts.skipped),
            "errors": dict(counts.errors),
            "copiesUnderWay": len(self._copies),
            "bytes": self._bytes,
            "differences": [*self._first, *self._latest],
        }
        if self.spec.compare == "scores" and counts.magnitude:
            document["meanError"] = counts.error / counts.magnitude
        if self.last_error:
            document["lastError"] = self.last_error
        return document

    # ------------------------------------------------------------------------------------------- copies

    def primary_answered(self, request: Request, answer: Answer) -> None:
        """Send a copy of a request whose client has the answer, if the bounds allow one."""
        if self.is_stopped:
            return
        pool = self._find_pool()
        if pool is None:
            self.skip("no_version")
            return
        if len(self._copies) >= self.spec.in_flight or pool.queued:
            self._drop(pool, "busy")
            return
        size = len(answer.body) + sum(len(part.body) for part in request.parts)
        if self._bytes + size > self._most_bytes:
            self._drop(pool, "memory")
            return
        copy = _Copy(self, pool, request, answer, size)
        self._copies.add(copy)
        self._bytes += size
        self.counts.mirrored += 1
        pool.metrics.shadow_mirrored += 1
        asyncio.get_running_loop().call_soon(copy.send)

    def skip(self, why: str) -> None:
        """Count a chosen request that cannot be mirrored, or whose copy cannot be compared."""
        self.counts.skipped[why] += 1

    def _drop(self, pool: Pool, why: str) -> None:
        self.counts.dropped[why] += 1
        pool.metrics.shadow_dropped[why] += 1

    def copy_answered(self, copy: _Copy, answer: Answer) -> None:
        """Compare the shadow's answer."""
        if self.spec.compare == "exact":
            self._judge(copy, answer, _first_difference(copy.answer, answer))
            self.end(copy)
            return
        size = len(answer.body)
        copy.size += size
        self._bytes += size  # may go over the bound until the copy ends; further copies are dropped meanwhile
        self._waiting.append((copy, answer))
        if self._comparing is None:
            self._comparing = asyncio.create_task(self._compare())

    def copy_failed(self, copy: _Copy, error: MarserveError) -> None:
        """Count a copy that the shadow did not answer."""
        if isinstance(error, WaitTooLong) or (isinstance(error, NoWorker) and type(error) is not NoWorker):
            self._drop(copy.pool, "busy")  # the version had too much to do; it made no error
        else:
            self._fail(copy.pool, error.cause or "unknown", f"{type(error).__name__}: {error}")
        self.end(copy)

    def copy_streamed(self, copy: _Copy) -> None:
        """Count a copy that the shadow streams; the client's whole answer cannot be compared with it."""
        self.skip("streamed")
        self.end(copy)

    def end(self, copy: _Copy) -> None:
        """Release a copy's bytes."""
        if copy in self._copies:
            self._copies.discard(copy)
            self._bytes -= copy.size

    def _fail(self, pool: Pool, cause: str, words: str) -> None:
        self.counts.errors[cause] += 1
        pool.metrics.shadow_errors[cause] += 1
        self.last_error = words[:500]

    # ------------------------------------------------------------------------------------------- comparing

    async def _compare(self) -> None:
        """Compare the waiting answers, some at a time, in a worker of the shadow."""
        try:
            while self._waiting and not self.is_stopped:
                several = [self._waiting.popleft() for _ in range(min(MOST_PAIRS, len(self._waiting)))]
                try:
                    await self._compare_several(several)
                finally:
                    for copy, _ in several:
                        self.end(copy)
        finally:
            self._comparing = None

    async def _compare_several(self, several: list[tuple[_Copy, Answer]]) -> None:
        pool, compare = several[0][0].pool, self.spec.compare
        pairs = [(copy.answer, answer) for copy, answer in several]
        try:
            checked = await pool.compare(pairs, "handler" if compare == "exact" else compare)
        except MarserveError as error:
            for _ in several:
                self._fail(pool, "comparison", f"{type(error).__name__}: {error}")
            return
        self.counts.error += checked.error
        self.counts.magnitude += checked.magnitude
        differences = {index: (run, path, seen, wanted) for run, index, path, seen, wanted in checked.differences}
        for index, (copy, answer) in enumerate(several):
            run, *difference = differences.get(index, ("answers", "", "", ""))
            if run == "failed":
                self._fail(pool, "comparison", difference[1])
            elif index in differences:
                self._judge(copy, answer, (difference[0], difference[1], difference[2]))
            else:
                self._judge(copy, answer, None)

    def _judge(self, copy: _Copy, answer: Answer, difference: tuple[str, str, str] | None) -> None:
        self.counts.compared += 1
        copy.pool.metrics.shadow_compared += 1
        if difference is None:
            return
        self.counts.differing += 1
        copy.pool.metrics.shadow_differing += 1
        where, shadow, primary = difference
        sample = {
            "requestId": copy.request.id,
            "at": time.time(),
            "where": where,
            "primary": primary,
            "shadow": shadow,
            "primaryAnswer": _text(copy.answer.body),
            "shadowAnswer": _text(answer.body),
            "request": [{"name": part.name, "body": _text(part.body)} for part in copy.request.parts[:10]],
        }
        if len(self._first) < KEPT_SAMPLES:
            self._first.append(sample)
        else:
            self._latest.append(sample)


class _Primary:
    """Passes everything to the client's own receiver first, and then to the shadow."""

    __slots__ = ("_request", "_shadow", "_streams", "receiver")

    def __init__(self, receiver: Receiver, request: Request, shadow: Shadow) -> None:
        self.receiver = receiver
        self._request = request
        self._shadow = shadow
        self._streams = False

    def on_answer(self, answer: Answer) -> None:
        """Pass on the whole answer, and mirror the request."""
        self.receiver.on_answer(answer)
        self._shadow.primary_answered(self._request, answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Pass on one piece of a stream; a streamed request is not mirrored."""
        self.receiver.on_piece(piece, last)
        if not self._streams:
            self._streams = True
            self._shadow.skip("streamed")

    def on_error(self, error: MarserveError) -> None:
        """Pass on the error that ends the request or its stream."""
        self.receiver.on_error(error)
        if not self._streams:
            self._shadow.skip("failed")


class _Copy:
    """A mirrored request, the client's answer to it, and the receiver of the shadow's answer. `size` is in bytes."""

    __slots__ = ("_has_ended", "_job", "_shadow", "answer", "pool", "request", "size")

    def __init__(self, shadow: Shadow, pool: Pool, request: Request, answer: Answer, size: int) -> None:
        self.pool = pool
        self.request = request
        self.answer = answer
        self.size = size
        self._shadow = shadow
        self._job: Accepted | None = None
        self._has_ended = False

    def send(self) -> None:
        """Hand it to the shadow's pool."""
        if self._has_ended:
            return
        copied = msgspec.structs.replace(
            self.request,
            priority=LEAST_URGENT,
            deadline=time.monotonic() + COPY_LIMIT_S,
            names_version=False,
            is_inner=True,  # not counted as a client's request
            timeline=None,
            trace_ids=b"",
        )
        try:
            self._job = self.pool.submit(copied, self)
        except MarserveError as error:
            self.on_error(error)

    def cancel(self) -> None:
        """Give the copy up; its answer is not compared."""
        self._has_ended = True
        if self._job is not None:
            self._job.cancel()
        self._shadow.end(self)

    def on_answer(self, answer: Answer) -> None:
        """Compare the shadow's whole answer."""
        if not self._has_ended:
            self._has_ended = True
            self._job = None
            self._shadow.copy_answered(self, answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Give up a copy that the shadow streams, at the first piece."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._job is not None and not last:
            # Not from here: the caller, which hands out pieces, still needs the job.
            asyncio.get_running_loop().call_soon(self._job.cancel)
        self._shadow.copy_streamed(self)

    def on_error(self, error: MarserveError) -> None:
        """Count the shadow's error."""
        if not self._has_ended:
            self._has_ended = True
            self._job = None
            self._shadow.copy_failed(self, error)


def _first_difference(primary: Answer, shadow: Answer) -> tuple[str, str, str] | None:
    """The first difference of two answers: its place, the shadow's text, the client's text; None if they are equal."""
    if primary.status != shadow.status:
        return "status", str(shadow.status), str(primary.status)
    ours, theirs = _content_type(primary), _content_type(shadow)
    if ours != theirs:
        return "header:content-type", theirs or "none", ours or "none"
    if primary.body == shadow.body:
        return None
    ends = min(len(primary.body), len(shadow.body))
    at = 0
    step = ends
    while step:  # the longest common beginning, by halving: bodies may be large
        if primary.body[at : at + step] == shadow.body[at : at + step]:
            at += step
            step = min(step, ends - at)
        else:
            step //= 2
    begin = max(0, at - 20)
    return f"byte {at}", _text(shadow.body[begin:], 80), _text(primary.body[begin:], 80)


def _content_type(answer: Answer) -> str | None:
    return next((value for name, value in answer.headers if name.lower() == "content-type"), None)


def _text(body: bytes | bytearray, most: int = SHOWN_BYTES) -> str:
    text = bytes(body[:most]).decode(errors="backslashreplace")
    return text if len(body) <= most else f"{text}… ({len(body)} bytes)"
