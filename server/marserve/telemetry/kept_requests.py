"""Keeps what some requests were, so that they can be run again: off unless it is asked for.

Whole batches are drawn, so that a request can be run with those that were beside it. A body that holds what must not
be shown is not kept, nor is one that is too large, or whose answer was a stream; why is kept in its place. Bodies are
looked through by the rules of `body_samples.py`, long ones on a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from marserve.errors import MarserveError
from marserve.messages import Accepted, Answer, Part, Receiver, Request, shown_id
from marserve.telemetry.body_samples import READ_BYTES, Hiding
from marserve.telemetry.timeline import BatchTimes, Timeline, timed, times_of

# What a request takes beside its body, its headers and its names.
KEPT_BYTES: Final = 2048
# And each span of its author's.
SPAN_BYTES: Final = 256
# One request may take so much of the whole.
LARGEST_SHARE: Final = 16


class KeptAnswer(NamedTuple):
    """What is known of an answer. `error` is the class of a failure's cause, and `digest` then that of its message."""

    status: int
    size: int
    digest: str
    error: str = ""


class Replayed(NamedTuple):
    """What came of a batch that was run again: its times, and for each request its answer or the error."""

    times: BatchTimes
    ended: list[Answer | MarserveError]


def answer_of(answer: Answer) -> KeptAnswer:
    """The facts by which two answers are compared."""
    return KeptAnswer(answer.status, len(answer.body), _digest(answer.body))


def failure_of(error: MarserveError) -> KeptAnswer:
    """The same of a failure."""
    return KeptAnswer(0, 0, _digest(error.message.encode("utf-8", "replace")), error.cause or type(error).__name__)


class KeptRequest(msgspec.Struct, eq=False):
    """A request of a batch that was drawn. `request` is None if it cannot be run again, and `why_not` says why.

    `left_out` names the headers that must not be kept. `timeline` is its first time; its surface ends it.
    """

    id: str
    client_id: str
    model: str
    version: str
    batch: BatchTimes
    timeline: Timeline
    is_inner: bool
    answer: KeptAnswer
    size: int
    request: Request | None = None
    why_not: str = ""
    left_out: Sequence[str] = ()

    def is_called(self, request_id: str) -> bool:
        """Whether this is one of its ids: the server's, the client's, its trace's."""
        trace = self.timeline.trace
        return request_id in (self.id, self.client_id) or (trace is not None and trace.trace_id == request_id)


class KeptRequests:
    """Keeps a share of all batches' requests in `limit_bytes`; the oldest leave first. All calls are the event loop's.

    `draw` is a number from 0 to 1 for a batch, the same one for each of its requests. `look` runs a call elsewhere.
    """

    def __init__(
        self,
        share: float,
        limit_bytes: int,
        hiding: Hiding,
        *,
        draw: Callable[[BatchTimes], float] | None = None,
        look: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.share, self.limit_bytes = share, limit_bytes
        self.most_bytes = limit_bytes // LARGEST_SHARE
        self.kept_bytes = 0
        self._hiding = hiding
        self._salt = random.random()
        self._draw = draw or self._drawn
        self._look = look or _on_a_thread
        self._kept: deque[KeptRequest] = deque()

    def watch(self, request: Request, receiver: Receiver) -> Watched:
        """The receiver in the place of a request's own; its `job` must be set once it is accepted."""
        return Watched(self, request, receiver)

    def find(self, request_id: str) -> KeptRequest | None:
        """The newest request of this id; one that a client sent before those that were made for it."""
        found = [each for each in reversed(self._kept) if each.is_called(request_id)]
        return next((each for each in found if not each.is_inner), found[0] if found else None)

    def batch_of(self, kept: KeptRequest) -> list[KeptRequest]:
        """Those of its batch that are still known, in their order, itself included."""
        return [each for each in self._kept if each.batch is kept.batch]

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, request: Request, job: Accepted | None, answer: KeptAnswer | None, ended_at: float) -> None:
        """A request has ended; `answer` None: by a stream."""
        accepted = timed(job)
        times = None if accepted is None else accepted.times
        if accepted is None or times is None or request.is_describe or self._draw(times) >= self.share:
            return  # no worker had it, or its batch is not drawn
        timeline = request.timeline
        if timeline is None:
            timeline = Timeline(request.id, accepted.arrived, client_id=request.client_id)
            timeline.admitted_at, timeline.of = accepted.arrived, times.of
            timeline.left_in(times)
            timeline.end(ended_at, 0 if answer is None else answer.status, 0 if answer is None else answer.size)
        kept = KeptRequest(
            shown_id(request.id),
            request.client_id,
            times.of.model,
            times.of.version,
            times,
            timeline,
            request.is_inner,
            answer or KeptAnswer(0, 0, ""),
            KEPT_BYTES + (0 if times.work is None else len(times.work.spans) * SPAN_BYTES),
        )
        self._fill(kept, request, is_stream=answer is None)
        self.kept_bytes += kept.size
        self._kept.append(kept)
        while self.kept_bytes > self.limit_bytes:
            self.kept_bytes -= self._kept.popleft().size

    def _fill(self, kept: KeptRequest, request: Request, *, is_stream: bool) -> None:
        size = sum(len(part.body) for part in request.parts)
        if is_stream:
            kept.why_not = "its answer was a stream, and streams are not run again"
        elif request.shares_memory:
            kept.why_not = "its tensors lay in shared memory, which its client has changed since"
        elif size > self.most_bytes:
            kept.why_not = (
                f"its body has {size} bytes, and of bodies over {self.most_bytes} none is kept: "
                f"a {LARGEST_SHARE}th of replay_size"
            )
        if kept.why_not:
            return
        lines = (*request.headers, *request.server_headers)
        kept.size += size + sum(len(name) + len(value) for name, value in lines)
        left_out = sorted({_name(name) for name, _ in request.headers if self._hiding.hides(_name(name))})
        kept.left_out = left_out
        copy = Request(
            request.id,
            # Copied: a large body has its place among all bytes in flight, and gives it back when it is let go.
            [
                part if type(part.body) is bytes else Part(part.name, bytes(part.body), part.content_type)
                for part in request.parts
            ],
            [line for line in request.headers if _name(line[0]) not in left_out] if left_out else request.headers,
            request.server_headers,
            is_explain=request.is_explain,
            names_version=True,
            is_inner=True,
            depth=request.depth,
            key=request.key,
            client_id=request.client_id,
        )

        def look() -> None:
            """Look for what must not be kept."""
            hidden = next((name for part in copy.parts if (name := self._hiding.found_in(part))), "")
            if hidden:
                kept.why_not = f"it was redacted: it has a value under {hidden[:100]!r}, which body_sample_hide names"
            else:
                kept.request, kept.why_not = copy, ""

        if size <= READ_BYTES:
            look()
        else:
            kept.why_not = "it is being looked through for what body_sample_hide names; ask again in a moment"
            self._look(look)

    def _drawn(self, times: BatchTimes) -> float:
        return hash((self._salt, times.worker, times.sent_at)) % 1_000_003 / 1_000_003


class Watched(Receiver):
    """Passes an answer on, and has the request kept when it has ended."""

    __slots__ = ("_keeper", "_request", "job", "receiver")

    def __init__(self, keeper: KeptRequests, request: Request, receiver: Receiver) -> None:
        self.receiver = receiver
        self._keeper, self._request = keeper, request
        self.job: Accepted | None = None

    def on_answer(self, answer: Answer) -> None:
        """Pass on the whole answer."""
        self.receiver.on_answer(answer)
        self._keep(
            answer_of(answer)
            if len(answer.body) <= self._keeper.most_bytes
            else KeptAnswer(answer.status, len(answer.body), "")
        )

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Pass on a piece."""
        self.receiver.on_piece(piece, last)
        if last:
            self._keep(None)

    def on_error(self, error: MarserveError) -> None:
        """Pass on the error."""
        self.receiver.on_error(error)
        self._keep(failure_of(error))

    def _keep(self, answer: KeptAnswer | None) -> None:
        job, self.job = self.job, None
        times = times_of(job)
        self._keeper.take(self._request, job, answer, 0.0 if times is None else times.landed_at)


def _on_a_thread(call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().run_in_executor(None, call)


def _name(name: bytes) -> str:
    return name.decode("latin-1").lower()


def _digest(body: bytes | bytearray) -> str:
    return hashlib.sha256(body).hexdigest()
