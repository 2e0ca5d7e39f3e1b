"""What workers print: two pipes a worker, read on the event loop in bounded turns, as lines for the model log.

Lines of the worker's logging have their level (`pool/worker_end/output_lines.py` reads it); other lines are INFO on
standard output and WARNING on standard error. The newest lines are kept: they say why a worker died.

A worker that prints a gigabyte slows no other model down. After each turn its pipe rests for a time that grows with the
turn's cost and with the turns of all other pipes; meanwhile the worker may have to wait in `print`. Lines beyond the
log's budget (`telemetry/logs/output_budget.py`) are counted and dropped, and once a second a line says how many. That a
worker prints a lot is told once a second, too: requests of others may have waited for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from marserve.pool.worker_end.output_lines import (
    BYTES_A_TURN,
    LineCutter,
    Skipped,
    TurnSize,
    fit_ids,
    read_lines,
)
from marserve.telemetry.happenings import Bursts
from marserve.telemetry.logs.output_budget import CUT_S, SHARED_BYTES_PER_S, OutputBudget, Turns
from marserve.telemetry.logs.worker_lines import Stream, WorkerLines

KEPT_LINES = 20
# Python prints at most 100 frames of a thread that crashed.
ERROR_LINES, MAX_ERROR_LENGTH = 160, 400
# From so much within a second on a worker prints a lot: the log does not take that for long.
LOUD_BYTES = SHARED_BYTES_PER_S
# How many turns a pipe gets at its end, without rests: enough for twice what it holds and what was read last.
LAST_TURNS = 32
_ERRORS_A_TURN = 16


class WorkerLog(Protocol):
    """Where lines go; `budget` bounds them."""

    @property
    def budget(self) -> OutputBudget:
        """The bound for all workers together."""

    def write(self, lines: WorkerLines) -> None:
        """Take records; never blocks."""


class WorkerOutput:
    """The output of one worker process.

    `tell_loud` is told when the worker prints a lot: since when, until when, and how many bytes.
    """

    def __init__(
        self,
        model: str,
        version: str,
        worker_id: str,
        log: WorkerLog,
        tell_loud: Callable[[float, float, int], None] | None = None,
    ) -> None:
        self._model, self._version, self._worker_id, self._log = model, version, worker_id, log
        self._allowance = log.budget.allowance()
        self._kept: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))
        self._errors: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=ERROR_LINES))
        self.teller = 0
        self._pipes: list[_Pipe] = []
        self._closed: list[asyncio.Future[None]] = []
        self._cut_end: asyncio.TimerHandle | None = None
        self._tell_loud = tell_loud
        self._loud = Bursts(LOUD_BYTES)

    @property
    def last_lines(self) -> list[str]:
        """The newest lines, oldest first; in a group those of the rank `teller`, which ended first."""
        return list(self._kept[self.teller])

    @property
    def last_errors(self) -> list[str]:
        """The newest lines of standard error, oldest first and cut short: more than `last_lines` has.

        What C++ says of its end stands before the stack that Python prints of it.
        """
        return list(self._errors[self.teller])

    async def open(self, rank: int = 0) -> tuple[int, int]:
        """Make the two pipes and begin to read; the caller gets, and must close, their write ends.

        Each rank of a group has two pipes; the log names the worker `ID.RANK`, and rank 0 as the worker itself. Raises
        OSError if the system gives no more descriptors; nothing is open then.
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
        lines = _Pipe(self, self._log.budget.turns(), stream, rank, closed)
        try:
            await loop.connect_read_pipe(lambda: lines, pipe)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(read_end)  # the loop did not take it
            raise
        except BaseException:
            pipe.close()
            raise
        self._closed.append(closed)
        self._pipes.append(lines)
        return write_end

    async def settled(self, timeout_s: float) -> None:
        """Wait until the pipes are at their end, so that the last lines are read. From now on the pipes do not rest."""
        for pipe in self._pipes:
            pipe.hurry()
        if self._closed:
            await asyncio.wait(self._closed, timeout=timeout_s)

    async def drained(self, timeout_s: float) -> None:
        """Wait until the pipes are at their end; then close them."""
        await self.settled(timeout_s)
        for pipe in self._pipes:
            pipe.close()
        self._end_cut()

    def take_turn(self, cutter: LineCutter, stream: Stream, rank: int, most_bytes: int = BYTES_A_TURN) -> None:
        """Log the next lines of a pipe; while the worker's output is cut, drop all lines that are held."""
        if self._allowance.cut_until:
            skipped = cutter.skip()
            self._listen(skipped.size)
            self._drop(cutter, skipped, stream, rank)
            return
        lines = cutter.take(most_bytes)
        if not lines:
            return
        size = sum(map(len, lines))
        self._listen(size)
        if self._admits(len(lines), size):
            self._read(cutter, lines, stream, rank)
        else:
            self._drop(cutter, Skipped(b"\n".join(lines) + b"\n"), stream, rank)

    def drop_all(self, cutter: LineCutter, stream: Stream, rank: int) -> None:
        """Drop all lines that are held."""
        self._drop(cutter, cutter.skip(), stream, rank)
        self._begin_cut()

    def end_line(self, cutter: LineCutter, stream: Stream, rank: int) -> None:
        """Log the incomplete line at a pipe's end."""
        self._read(cutter, cutter.end(), stream, rank)
        self._end_record(cutter, stream, rank)

    def take(self, stream: Stream, level: str, texts: Sequence[str], ids: str) -> None:
        """Log records of a worker on another machine."""
        size = sum(map(len, texts))
        self._listen(size)
        if self._allowance.cut_until or not self._admits(len(texts), size):
            self._allowance.leave_out(len(texts), size)
            self._keep(stream, texts, 0)
        else:
            self._write(stream, level, texts, 0, fit_ids(ids))

    def log_failure(self, sentence: str, traceback: str, ids: str = "") -> None:
        """Log why requests failed, with a traceback as an error. Tracebacks beyond the budget are left out."""
        text = sentence
        if traceback:
            if self._allowance.admit_traceback(time.monotonic(), len(traceback)):
                text = "\n".join([sentence, *traceback.rstrip().splitlines()])
            else:
                text += "\n(The traceback is left out: there were too many of them just now.)"
        level = "ERROR" if traceback else "INFO"
        self._log.write(WorkerLines(self._model, self._version, self._worker_id, "stderr", level, [text], ids))

    def _listen(self, size: int) -> None:
        """So many bytes came."""
        if self._tell_loud is not None:
            now = time.monotonic()
            if (loud := self._loud.add(now, size)) is not None:
                self._tell_loud(loud.began, now, loud.amount)

    def _admits(self, lines: int, size: int) -> bool:
        if self._allowance.admit(time.monotonic(), lines, size):
            return True
        self._begin_cut()
        return False

    def _begin_cut(self) -> None:
        if self._cut_end is None:
            loop = asyncio.get_running_loop()
            self._cut_end = loop.call_later(CUT_S, self._end_cut)

    def _end_cut(self) -> None:
        """Say how many lines were left out, and take lines again."""
        if self._cut_end is not None:
            self._cut_end.cancel()
            self._cut_end = None
        lines, size = self._allowance.end_cut()
        if lines:
            text = f"{lines} lines ({size} bytes) of this worker were left out: it prints more than the log takes"
            self._log.write(WorkerLines(self._model, self._version, self._worker_id, "stderr", "WARNING", [text]))

    def _drop(self, cutter: LineCutter, skipped: Skipped, stream: Stream, rank: int) -> None:
        """Count lines that are not logged. Some of the errors among them are logged; the newest lines are kept."""
        self._end_record(cutter, stream, rank)
        lines, size = skipped.lines, skipped.size
        for error in skipped.errors(_ERRORS_A_TURN):
            if not self._allowance.admit_error(time.monotonic(), len(error)):
                break
            lines -= 1
            size -= len(error) + 1
            for level, ids, texts in read_lines([error], _level_of(stream)):
                self._write(stream, level, texts, rank, ids)
        if lines:
            self._allowance.leave_out(lines, size)
        for said in read_lines(skipped.last(KEPT_LINES), _level_of(stream)):
            self._keep(stream, said.texts, rank)

    def _read(self, cutter: LineCutter, lines: Sequence[bytes], stream: Stream, rank: int) -> None:
        if lines:
            for level, ids, texts in cutter.records.read(lines, _level_of(stream)):
                self._write(stream, level, texts, rank, ids)

    def _end_record(self, cutter: LineCutter, stream: Stream, rank: int) -> None:
        for level, ids, texts in cutter.records.end():
            self._write(stream, level, texts, rank, ids)

    def _keep(self, stream: Stream, texts: Sequence[str], rank: int) -> None:
        for text in texts[-KEPT_LINES:]:
            self._kept[rank].extend(text.split("\n"))
        if stream == "stderr":
            for text in texts[-ERROR_LINES:]:
                self._errors[rank].extend(line[:MAX_ERROR_LENGTH] for line in text.split("\n"))

    def _write(self, stream: Stream, level: str, texts: Sequence[str], rank: int, ids: str) -> None:
        self._keep(stream, texts, rank)
        worker_id = f"{self._worker_id}.{rank}" if rank else self._worker_id
        self._log.write(WorkerLines(self._model, self._version, worker_id, stream, level, texts, ids))


def _level_of(stream: Stream) -> str:
    return "INFO" if stream == "stdout" else "WARNING"


class ReadEnd:
    """The read end of a pipe, as event loops take it.

    uvloop (`closes_itself`) closes the descriptor and then calls `close`. By then its number may belong to a file that
    another thread has opened, which a second close would close.
    """

    def __init__(self, descriptor: int, *, closes_itself: bool) -> None:
        self._descriptor = descriptor
        self._is_open = not closes_itself

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Close it once, unless the loop does. May be called again."""
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


class _Pipe(asyncio.Protocol):
    """Reads one pipe. Nothing is read while it rests, or holds lines for further turns."""

    def __init__(
        self, output: WorkerOutput, turns: Turns, stream: Stream, rank: int, closed: asyncio.Future[None]
    ) -> None:
        self._output, self._turns, self._stream, self._rank, self._closed = output, turns, stream, rank, closed
        self._cutter = LineCutter()
        self._size = TurnSize()
        self._transport: asyncio.ReadTransport | None = None
        self._rest: asyncio.TimerHandle | None = None
        self._is_hurried = False
        self._last_turns = LAST_TURNS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.ReadTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._cutter.feed(data)
        self._turn()

    def connection_lost(self, error: Exception | None) -> None:
        self._wake()
        if self._cutter.has_lines:
            self._output.drop_all(self._cutter, self._stream, self._rank)
        self._output.end_line(self._cutter, self._stream, self._rank)
        if not self._closed.done():
            self._closed.set_result(None)

    def hurry(self) -> None:
        """The worker has ended: read what the pipe still holds, without rests."""
        self._is_hurried = True
        if self._wake():
            self._go_on()

    def close(self) -> None:
        """Close the pipe."""
        self._wake()
        if self._transport is not None:
            self._transport.close()

    def _turn(self) -> None:
        if self._is_hurried:
            rest_s = 0.0
            if not self._last_turns:  # a process that the worker left behind goes on printing
                self._output.drop_all(self._cutter, self._stream, self._rank)
                return
            self._last_turns -= 1
            self._output.take_turn(self._cutter, self._stream, self._rank)
        else:
            began_s = time.thread_time()
            self._output.take_turn(self._cutter, self._stream, self._rank, self._size.bytes)
            spent_s = time.thread_time() - began_s
            self._size.note(spent_s)
            now = time.monotonic()
            rest_s = self._turns.next(now, spent_s) - now
        assert self._transport is not None
        self._transport.pause_reading()
        self._rest = asyncio.get_running_loop().call_later(rest_s, self._go_on)

    def _go_on(self) -> None:
        self._rest = None
        if self._cutter.has_lines:
            self._turn()
        if self._rest is None and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _wake(self) -> bool:
        """End the rest; returns whether the pipe was resting."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.cancel()
        return rest is not None
