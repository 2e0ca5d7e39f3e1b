"""What workers print: two pipes a worker, read on the event loop, cut into lines for the model log.

Lines of the worker's logging carry a mark with their level (`worker/loop.py` puts it there); other lines are INFO on
standard output and WARNING on standard error. The newest lines are kept for whoever asks why a worker died. A line is
bounded, and the log it goes to never blocks: an author who prints a gigabyte slows nobody else down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import defaultdict, deque
from typing import Literal, Protocol

MAX_LINE_BYTES = 8192
KEPT_LINES = 20
_MARK = b"\x1e"
_LEVELS = {name.encode(): name for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}

Stream = Literal["stdout", "stderr"]


class WorkerLog(Protocol):
    """Where lines go."""

    def line(self, model: str, version: str, worker_id: str, stream: Stream, level: str, text: str) -> None:
        """Take one line; never blocks."""


class WorkerOutput:
    """The output of one worker process."""

    def __init__(self, model: str, version: str, worker_id: str, log: WorkerLog) -> None:
        self._model, self._version, self._worker_id, self._log = model, version, worker_id, log
        self._kept: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))
        self.teller = 0
        self._transports: list[asyncio.BaseTransport] = []
        self._closed: list[asyncio.Future[None]] = []

    @property
    def last_lines(self) -> list[str]:
        """The newest lines, oldest first: in a group of ranks those of `teller`, the one to ask why it ended."""
        return list(self._kept[self.teller])

    async def open(self, rank: int = 0) -> tuple[int, int]:
        """Make the two pipes and begin to read; the caller gets, and must close, their write ends.

        Each rank of a group has two of its own; in the log its lines are those of the worker `ID.RANK`, rank 0's of
        the worker. Raises OSError where the system gives no more descriptors; nothing is open then.
        """
        with contextlib.ExitStack() as ends:
            out = await self._open_one("stdout", rank, ends)
            err = await self._open_one("stderr", rank, ends)
            ends.pop_all()
            return out, err

    async def _open_one(self, stream: Stream, rank: int, ends: contextlib.ExitStack) -> int:
        loop = asyncio.get_running_loop()
        read_end, write_end = os.pipe()
        ends.callback(os.close, write_end)
        pipe = ReadEnd(read_end, closes_itself=type(loop).__module__.startswith("uvloop"))
        closed: asyncio.Future[None] = loop.create_future()
        try:
            transport, _ = await loop.connect_read_pipe(lambda: _Lines(self, stream, rank, closed), pipe)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(read_end)  # the loop did not take it
            raise
        except BaseException:
            pipe.close()
            raise
        self._closed.append(closed)
        self._transports.append(transport)
        return write_end

    async def settled(self, timeout_s: float) -> None:
        """Wait until both pipes are at their end, so that the last lines are in."""
        if self._closed:
            await asyncio.wait(self._closed, timeout=timeout_s)

    async def drained(self, timeout_s: float) -> None:
        """Wait until both pipes are at their end; then close them."""
        await self.settled(timeout_s)
        for transport in self._transports:
            transport.close()

    def take(self, stream: Stream, raw: bytes, rank: int = 0) -> None:
        """One line without its end."""
        level = "INFO" if stream == "stdout" else "WARNING"
        if raw.startswith(_MARK) and raw.count(_MARK) >= 2:
            _, marked, raw = raw.split(_MARK, 2)
            level = _LEVELS.get(marked, level)  # an author's own level has no name here
        text = raw.decode("utf-8", "backslashreplace").rstrip("\r")
        self._kept[rank].append(text)
        worker_id = f"{self._worker_id}.{rank}" if rank else self._worker_id
        self._log.line(self._model, self._version, worker_id, stream, level, text)


class ReadEnd:
    """The read end of a pipe, as event loops take it.

    uvloop (`closes_itself`) closes the descriptor, and calls `close` after that: by then its number may be that of a
    file which another thread has opened, so a second close would take it away from there.
    """

    def __init__(self, descriptor: int, *, closes_itself: bool) -> None:
        self._descriptor = descriptor
        self._is_open = not closes_itself

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Close it, once, where the loop does not. May be called again."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


class _Lines(asyncio.Protocol):
    """Cuts one pipe into lines."""

    def __init__(self, output: WorkerOutput, stream: Stream, rank: int, closed: asyncio.Future[None]) -> None:
        self._output, self._stream, self._rank, self._closed = output, stream, rank, closed
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._output.take(self._stream, line[:MAX_LINE_BYTES], self._rank)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._output.take(self._stream, self._rest[:MAX_LINE_BYTES], self._rank)
        if not self._closed.done():
            self._closed.set_result(None)
