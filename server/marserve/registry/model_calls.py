"""Calls that handlers make of other models: a request in the name of the request that they answer.

It has the same id and trace, ends no later than that one, and is accepted while the server drains. No call is accepted
that could wait for itself: one of a model that, directly or through others, waits for the caller. Chains of calls have
a bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import getrandbits
from time import monotonic

from marserve.errors import DeadlinePassed, HandlerFailed, MarserveError, ModelNotFound, OutOfMemory, VersionNotFound
from marserve.messages import Answer, Called, Part, Receiver, Request, Returned
from marserve.registry.data_plane import DataPlane
from marserve.telemetry.timeline import Timeline
from marserve.telemetry.trace_context import RANDOM, Trace, carried, find_parent, headers_within
from marserve.telemetry.traces.spans import CALL

MOST_DEPTH = 8
# A call ends before its caller is ended for taking too long.
SHARE_OF_TIME = 0.9

Reply = Callable[[Returned, bytes], None]


class ModelCalls:
    """Takes the calls of all handlers. Every method is called on the event loop."""

    def __init__(self, handler_status: int = 500) -> None:
        """`handler_status` is what a client is answered if the called model's handler raised."""
        self._handler_status = handler_status
        self._data_plane: DataPlane | None = None
        self._waiting: Counter[tuple[str, str]] = Counter()  # the caller's model and the called one

    def open(self, data_plane: DataPlane) -> None:
        """From now on calls go there; before, there are no models."""
        self._data_plane = data_plane

    def take(
        self, caller: str, request: Request, message: Called, body: bytes, ends_at: float, limit_s: float, reply: Reply
    ) -> None:
        """A handler of `caller`, which answers `request`, calls a model; `reply` is called once, now or later.

        `ends_at` is when it is called, on the monotonic clock, `limit_s` the longest time of the caller's batch.
        """
        latest = ends_at + SHARE_OF_TIME * limit_s
        deadline = latest if request.deadline is None else min(request.deadline, latest)
        model = message.model
        if request.depth >= MOST_DEPTH:
            reply(_failed(message, 508, f"{model} is not called: {MOST_DEPTH} models wait already."), b"")
            return
        if self._leads_to(model, caller):
            why = f"{model} is not called by {caller}: it would wait for itself."
            reply(_failed(message, 508, why), b"")
            return
        headers = [
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace")) for name, value in message.headers
        ]
        given = {name.lower() for name, _ in headers}
        if request.trace_ids and request.timeline is None:  # the called model's is kept below it
            trace = Trace(request.trace_ids.hex(), RANDOM)
            request.give_timeline(Timeline(request.id, ends_at, client_id=request.client_id, trace=trace))
        headers += [line for line in _carried(request) if line[0] not in given]
        timeline = None if request.timeline is None else _part(request.timeline, headers, f"{CALL}{model}")
        inner = Request(
            request.id,
            [Part("body", body, message.content_type)],
            headers,
            deadline=deadline,
            names_version=message.version is not None,
            priority=request.priority,
            is_inner=True,
            key=getrandbits(62) | 1,
            client_id=request.client_id,
            depth=request.depth + 1,
            timeline=timeline,
        )
        edge = caller, model
        receiver = _Waiting(message, reply, lambda: self._ended(edge), self._handler_status, timeline)
        self._waiting[edge] += 1
        try:
            assert self._data_plane is not None
            self._data_plane.submit(model, message.version, inner, receiver)
        except MarserveError as error:
            receiver.on_error(error)

    def _ended(self, edge: tuple[str, str]) -> None:
        self._waiting[edge] -= 1
        if not self._waiting[edge]:
            del self._waiting[edge]

    def _leads_to(self, model: str, caller: str) -> bool:
        """Whether `model` is the caller, or waits for it through calls that run now."""
        seen, left = {model}, [model]
        while left:
            each = left.pop()
            if each == caller:
                return True
            for waiting, called in self._waiting:
                if waiting == each and called not in seen:
                    seen.add(called)
                    left.append(called)
        return False


class _Waiting(Receiver):
    """Gathers one call's answer, and replies once."""

    def __init__(
        self,
        message: Called,
        reply: Reply,
        ended: Callable[[], None],
        handler_status: int,
        timeline: Timeline | None = None,
    ) -> None:
        self._message, self._reply, self._ended, self._handler_status = message, reply, ended, handler_status
        self._timeline = timeline
        self._pieces: list[bytes | bytearray] = []
        self._first: Answer | None = None

    def on_answer(self, answer: Answer) -> None:
        """The whole answer."""
        self.on_piece(answer, True)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """One piece; only the first one's status and headers count."""
        first = self._first = self._first or piece
        self._pieces.append(piece.body)
        if last:
            self._ended()
            if self._timeline is not None:
                self._timeline.end(monotonic(), first.status, sum(map(len, self._pieces)))
            self._reply(Returned(self._message.call, first.status, list(first.headers)), b"".join(self._pieces))

    def on_error(self, error: MarserveError) -> None:
        """No answer."""
        self._ended()
        status = _status_of(error, self._handler_status)
        if self._timeline is not None:
            self._timeline.end(monotonic(), status, 0, error.cause or "error")
        self._reply(_failed(self._message, status, error.message), b"")


def _carried(request: Request) -> list[tuple[bytes, bytes]]:
    """The headers that carry a request's trace on; where traces are kept, from its handler's span."""
    headers, timeline = carried(request.headers), request.timeline
    return headers if timeline is None or timeline.trace is None else headers_within(headers, timeline.trace)


def _part(timeline: Timeline, headers: Sequence[tuple[bytes, bytes]], what: str) -> Timeline | None:
    """The timeline of a call: below the span that its `traceparent` names, if that is one of the same trace."""
    if timeline.trace is None:
        return timeline.part(what, monotonic())
    named = find_parent(headers)
    is_own = named is not None and named.trace_id == timeline.trace.trace_id
    return timeline.part(what, monotonic(), named.span_id if named is not None and is_own else timeline.trace.handle_id)


def _failed(message: Called, status: int, why: str) -> Returned:
    return Returned(message.call, status, [], why)


def _status_of(error: MarserveError, handler_status: int) -> int:
    """The status that the caller's client gets if its handler passes the failure on."""
    if isinstance(error, HandlerFailed):
        return error.code or handler_status
    if isinstance(error, ModelNotFound | VersionNotFound):
        return 404
    if isinstance(error, DeadlinePassed):
        return 504
    return 507 if isinstance(error, OutOfMemory) else 503
