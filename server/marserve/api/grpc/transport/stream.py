"""One call as its service sees it: its messages come in and go out, and it ends once with a status.

A `Method` says how a service answers. Of a method that takes one message, the service begins when that message has
come, or when it is clear that none will (`only_message` raises then). A dialogue begins with its header.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Final, NamedTuple, Protocol

from h2.errors import ErrorCodes

from marserve.api.byte_ledger import ByteLedger, Hold, Refusal
from marserve.api.errors import NoRoomForBody, RequestTooSlow
from marserve.api.grpc.transport.framing import Message, MessageReader, framed
from marserve.api.grpc.transport.head import CallHead, trailers
from marserve.api.grpc.transport.limits import GrpcLimits
from marserve.api.grpc.transport.status import StatusCode
from marserve.errors import BadInput, DeadlinePassed, MarserveError
from marserve.telemetry.logs.log_limit import caused_by

log = logging.getLogger("marserve.api")

# A request's own deadline ends it with a reason; the call's comes a little later, for what does not look at the time.
DEADLINE_SLACK_S: Final = 0.1
# Messages of a dialogue that wait for its service; beyond them the client's window stays shut.
MOST_WAITING: Final = 4
# How long a message may take to come, beside what its length allows.
MESSAGE_S: Final = 30.0
MESSAGE_BYTES_PER_S: Final = 1024


class Refused(Exception):
    """A call that a service outside of `Calls` refuses."""

    def __init__(self, code: StatusCode, description: str) -> None:
        self.code = code
        self.description = description
        super().__init__(description)


class StreamGone(Exception):
    """The client has ended the call, or its connection, so that nothing more can be written to it."""


# A protocol: `Connection` is built upon streams.
class Wire(Protocol):
    """The connection of a stream, as the stream sees it. `number` is the stream's."""

    limits: GrpcLimits
    ledger: ByteLedger
    loop: asyncio.AbstractEventLoop
    peer: str

    def send_head(self, number: int, encoding: str) -> None:
        """Begin an answer whose compressed messages are compressed so."""

    def send(self, number: int, data: memoryview) -> memoryview | None:
        """Send what the client's windows take of `data`; returns what is left, None if nothing is."""

    def send_trailers(self, number: int, fields: list[tuple[bytes, bytes]]) -> None:
        """End an answer."""

    def send_only_trailers(self, number: int, fields: list[tuple[bytes, bytes]]) -> None:
        """End a call without an answer."""

    def reset(self, number: int, code: int = ErrorCodes.CANCEL) -> None:
        """Have the client send nothing more of a call; the code of HTTP/2 says why."""

    def acknowledge(self, number: int, flow_bytes: int) -> None:
        """Let the client send as many bytes more."""

    def block(self, stream: Stream) -> None:
        """Have the stream go on when its client takes more."""

    def forget(self, stream: Stream) -> None:
        """The stream is over."""


class Method(NamedTuple):
    """How calls of a method are answered. `answer` returns the one message of an answer; None: it has written all."""

    answer: Callable[[Stream], Awaitable[bytes | Message | None]]
    is_dialogue: bool = False


class Stream:
    """One call. Used on the event loop of its connection alone."""

    __slots__ = (
        "_callbacks",
        "_coming",
        "_connection",
        "_counted",
        "_end",
        "_has_begun_answer",
        "_hold",
        "_messages",
        "_method",
        "_pending",
        "_reader",
        "_reading",
        "_task",
        "_timer",
        "_withheld",
        "_writing",
        "answer_encoding",
        "blocked_since",
        "deadline",
        "encoding",
        "fault",
        "is_half_closed",
        "is_late",
        "is_open",
        "message_since",
        "metadata",
        "number",
        "path",
        "trailers",
    )

    def __init__(self, connection: Wire, number: int, head: CallHead, method: Method, now: float) -> None:
        self._connection = connection
        self._method = method
        self.number = number
        self.path = head.path
        self.metadata = head.metadata
        self.encoding = head.encoding
        self.answer_encoding = head.answer_encoding
        self.deadline = None if head.timeout_s is None else now + head.timeout_s
        # What is sent behind the answer of a call that ends well, beside its status.
        self.trailers: Sequence[tuple[str, str]] = ()
        # Why the message that the service waits for will not come.
        self.fault: MarserveError | None = head.fault
        # When the message began to come that has not come whole.
        self.message_since = now
        self.blocked_since: float | None = None
        # The client may still be written to.
        self.is_open = True
        self.is_half_closed = False
        self.is_late = False
        self._reader = MessageReader(connection.limits.message_bytes)
        self._messages: deque[tuple[Message, Hold, int]] = deque()
        self._hold: Hold | None = None
        # The room of the message that is coming, if it comes in pieces, and how much of it is counted.
        self._coming: Hold | None = None
        self._counted = 0
        self._withheld = 0
        self._pending: memoryview | None = None
        self._end: list[tuple[bytes, bytes]] | None = None
        self._has_begun_answer = False
        self._reading: asyncio.Future[None] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if self.deadline is not None:
            self._timer = connection.loop.call_at(
                connection.loop.time() + self.deadline - now + DEADLINE_SLACK_S, self._expire
            )
        if method.is_dialogue or self.fault is not None:
            self._begin()

    # ------------------------------------------------------------------------------------------- for services

    @property
    def peer(self) -> str:
        """The client's address and port."""
        return self._connection.peer

    def only_message(self) -> Message:
        """The message of a method that takes one. Raises what is wrong with it."""
        if self.fault is not None:
            raise self.fault
        return self._messages[0][0]

    async def read(self) -> Message | None:
        """The next message of a dialogue; None: the client has said all. Its room is given back at the next read.

        Raises what is wrong with the message.
        """
        self._let_go()
        while not self._messages:
            if self.fault is not None:
                raise self.fault
            if self.is_half_closed:
                return None
            self._reading = self._connection.loop.create_future()
            await self._reading
        message, self._hold, flow_bytes = self._messages.popleft()
        if self.is_open:
            self._connection.acknowledge(self.number, flow_bytes)
        return message

    def take_hold(self) -> Hold:
        """The room of the message that `read` gave; the caller gives it back. May be called once a message."""
        hold, self._hold = self._hold, None
        assert hold is not None
        return hold

    async def write(self, data: bytes | Message) -> None:
        """Send one message; returns when the client's window has taken it. Raises StreamGone."""
        if not self.is_open:
            raise StreamGone
        self._pending = memoryview(framed(data))
        self.pump()
        if self._pending is not None:
            self._writing = self._connection.loop.create_future()
            await self._writing

    def end(
        self,
        code: StatusCode,
        description: str = "",
        metadata: Sequence[tuple[str, str]] = (),
        answer: bytes | Message | None = None,
    ) -> None:
        """End the call with this status, behind `answer` if there is one. Does nothing for one that has ended."""
        if not self.is_open or self._end is not None:
            return
        if answer is not None:
            self._pending = memoryview(framed(answer))
        self._end = trailers(code, description, metadata)
        self.pump()

    def drop(self) -> None:
        """End the call without a status, which could not overtake what its client does not take."""
        if self.is_open:
            self._connection.reset(self.number)
            self.gone()

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when the service has ended and the client has all of the answer, or is gone."""
        self._callbacks.append(callback)

    # ------------------------------------------------------------------------------------------- for the connection

    def receive(self, data: bytes, flow_bytes: int, now: float) -> None:
        """Take bytes of the client that count so much in its windows."""
        if self._reader.is_between_messages:
            self.message_since = now
        has_enough = bool(self._messages) and not self._method.is_dialogue
        if has_enough or self.fault is not None or self._end is not None:
            self._connection.acknowledge(self.number, flow_bytes)
            return
        try:
            whole = self._reader.add(data)
            for message in whole:
                self._messages.append((message, self._room_of_whole(message, now), 0))
            if self._reader.announced is not None:
                self._count_part(self._reader.announced, now)
        except MarserveError as error:
            self._connection.acknowledge(self.number, flow_bytes)
            self.break_off(error)
            return
        if self._coming is not None and self._coming.is_waiting:
            self._withheld += flow_bytes
        elif whole and len(self._messages) > MOST_WAITING:
            message, hold, before = self._messages[-1]
            self._messages[-1] = (message, hold, before + flow_bytes)
        else:
            self._connection.acknowledge(self.number, flow_bytes)
        if whole:
            self.message_since = now
            self._go_on()

    def close_half(self) -> None:
        """The client has said all."""
        self.is_half_closed = True
        if not self._reader.is_between_messages:
            self.break_off(BadInput("The call ends in the middle of a message."))
        elif self._task is None:
            self.break_off(BadInput("The call has no message; this method takes one."))
        else:
            self._go_on()

    def break_off(self, error: MarserveError) -> None:
        """Nothing more can be read of the client, because of this."""
        if self.fault is None:
            self.fault = error
            if self._coming is not None:
                self._coming.close()
                self._coming = None
            self._go_on()

    def check(self, now: float, stall_timeout_s: float) -> None:
        """Give up a message that comes too slowly, and an answer that the client does not take."""
        if self.blocked_since is not None and now - self.blocked_since >= 2 * stall_timeout_s:
            self.drop()  # what a service writes is given up by the service, which says so, after half of it
        elif self.fault is None and (self._task is None or not self._reader.is_between_messages):
            limit_s = MESSAGE_S + (self._reader.announced or 0) / MESSAGE_BYTES_PER_S
            if now - self.message_since >= limit_s and self.is_reading:
                self.break_off(RequestTooSlow("message", limit_s))

    def pump(self) -> None:
        """Send what the client's windows take, and the status behind it."""
        if not self.is_open:
            return
        connection, number = self._connection, self.number
        if self._pending is not None:
            if not self._has_begun_answer:
                self._has_begun_answer = True
                connection.send_head(number, self.answer_encoding)
            left = connection.send(number, self._pending)
            if left is not None:
                if self.blocked_since is None or len(left) < len(self._pending):
                    self.blocked_since = monotonic()
                self._pending = left
                connection.block(self)
                return
            self._pending = self.blocked_since = None
            if self._writing is not None and not self._writing.done():
                self._writing.set_result(None)
        if self._end is not None:
            if self._has_begun_answer:
                connection.send_trailers(number, self._end)
            else:
                connection.send_only_trailers(number, self._end)
            if not self.is_half_closed:
                connection.reset(number, ErrorCodes.NO_ERROR)
            self.is_open = False
            self._look_over()

    def gone(self) -> None:
        """The client, or its connection, has ended the call."""
        self.is_open = False
        self._pending = None
        if self._writing is not None and not self._writing.done():
            self._writing.set_exception(StreamGone())
            self._writing.exception()  # its waiter may have been cancelled
        if self._task is not None:
            self._task.cancel()
        self._look_over()

    # ------------------------------------------------------------------------------------------- for the ledger

    @property
    def is_reading(self) -> bool:
        """Whether the client holds its message up."""
        return self._coming is None or not self._coming.is_waiting

    def go_on(self) -> None:
        """The message has room: let more of it come."""
        withheld, self._withheld = self._withheld, 0
        if self.is_open:
            self._connection.acknowledge(self.number, withheld)

    def give_up(self, why: Refusal) -> None:
        """The message has no room any more."""
        self._coming = None
        self.break_off(NoRoomForBody(self._connection.ledger.limit, why))
        self.go_on()

    # ------------------------------------------------------------------------------------------- inside

    def _room_of_whole(self, message: Message, now: float) -> Hold:
        """The room of a message that has come. Raises NoRoomForBody."""
        hold, self._coming, counted, self._counted = self._coming, None, self._counted, 0
        if hold is None:
            hold = self._connection.ledger.take(len(message.data))
        elif not hold.take(len(message.data) - counted, now) or not hold.complete():
            hold = None
        if hold is None:
            raise NoRoomForBody(self._connection.ledger.limit)
        return hold

    def _count_part(self, announced: int, now: float) -> None:
        """Count what has come of a message that is not whole. Raises NoRoomForBody."""
        if self._coming is None:
            self._coming = self._connection.ledger.open(announced, self, now)
        new = self._reader.buffered - self._counted
        self._counted += new
        if not self._coming.take(new, now):
            raise NoRoomForBody(self._connection.ledger.limit)

    def _go_on(self) -> None:
        """A message has come, or it is clear that none will."""
        if self._task is None:
            self._begin()
        elif self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def _begin(self) -> None:
        self._task = self._connection.loop.create_task(self._run())
        self._task.add_done_callback(self._service_ended)

    async def _run(self) -> None:
        try:
            answer = await self._method.answer(self)
            self.end(StatusCode.OK, metadata=self.trailers, answer=answer)
        except Refused as error:
            self.end(error.code, error.description)
        except StreamGone:
            pass
        except asyncio.CancelledError:
            if self.is_late:
                self.end(StatusCode.DEADLINE_EXCEEDED, "The deadline of the call has passed.")
            else:
                self.drop()
        except Exception:
            log.exception("A gRPC call of %s failed", self.path, extra=caused_by(self.peer))
            self.end(StatusCode.INTERNAL, "The server has a defect; its log says more.")

    def _service_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before it began
            self.drop()
        self._look_over()

    def _expire(self) -> None:
        self._timer = None
        self.is_late = True
        if self._task is None:
            self.break_off(DeadlinePassed("queue"))
        elif not self._task.done():
            self._task.cancel()

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def _look_over(self) -> None:
        """Forget the call once its service has ended and nothing of it is left to be sent."""
        if self.is_open or (self._task is not None and not self._task.done()):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._let_go()
        if self._coming is not None:
            self._coming.close()
            self._coming = None
        for _, hold, _ in self._messages:
            hold.close()
        self._messages.clear()
        self._connection.forget(self)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
