"""Tests for what workers print: cutting into lines, levels, bounds, and what is kept of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from marserve.pool.worker_end.output import KEPT_LINES, LAST_TURNS, LOUD_BYTES, ReadEnd, WorkerOutput
from marserve.pool.worker_end.output_lines import BYTES_A_TURN, LINES_A_TURN, MAX_LINE_BYTES, TurnSize
from marserve.telemetry.logs.output_budget import SHARED_BURST_BYTES, TURN_S, Turns
from support.worker_logs import KeptLines

pytestmark = pytest.mark.anyio


class Pipes:
    """The write ends of one worker's output, and the lines that came of it."""

    def __init__(self, output: WorkerOutput, log: KeptLines, out: int, err: int) -> None:
        self.output, self.log, self.out, self.err = output, log, out, err

    async def close(self) -> list[tuple[str, str, str]]:
        """The worker is gone: returns (stream, level, text) of all lines."""
        for descriptor in (self.out, self.err):
            if descriptor >= 0:
                os.close(descriptor)
        self.out = self.err = -1
        await self.output.drained(5.0)
        return [(line.stream, line.level, line.text) for line in self.log.lines]


@pytest.fixture
async def pipes() -> AsyncIterator[Pipes]:
    """An open output; closed after the test."""
    log = KeptLines()
    output = WorkerOutput("m", "1.0", "9000", log)
    pipes = Pipes(output, log, *await output.open())
    yield pipes
    await pipes.close()


async def write(descriptor: int, data: bytes) -> None:
    """Write all of it while the loop goes on reading."""
    await asyncio.to_thread(_write, descriptor, data)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


async def test_lines_carry_model_version_and_worker(pipes: Pipes) -> None:
    """So that whoever reads the log knows who spoke."""
    await write(pipes.out, b"hello\n")
    await pipes.close()

    [line] = pipes.log.lines
    assert (line.model, line.version, line.worker_id, line.text) == ("m", "1.0", "9000", "hello")


async def test_a_print_is_info_and_an_error_output_is_a_warning(pipes: Pipes) -> None:
    """Unless it says otherwise."""
    await write(pipes.out, b"one\n")
    await write(pipes.err, b"two\n")

    assert sorted(await pipes.close()) == [("stderr", "WARNING", "two"), ("stdout", "INFO", "one")]


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
async def test_a_marked_line_has_its_level(pipes: Pipes, level: str) -> None:
    """Workers' logging marks its lines."""
    await write(pipes.out, f"\x1e{level}\x1etext \x1e more\n".encode())

    assert await pipes.close() == [("stdout", level, "text \x1e more")]


@pytest.mark.parametrize(
    ("raw", "level", "text"),
    [
        (b"\x1eNOTICE\x1etext", "INFO", "text"),
        (b"\x1e\x1etext", "INFO", "text"),
        (b"\x1eforged log line\x1etext", "INFO", "text"),
        (b"\x1eERROR text", "INFO", "\x1eERROR text"),
        (b"a\x1eERROR\x1etext", "INFO", "a\x1eERROR\x1etext"),
    ],
)
async def test_a_mark_that_names_no_level_gives_none(pipes: Pipes, raw: bytes, level: str, text: str) -> None:
    """An author may print what he likes; the log's levels stay Python's."""
    await write(pipes.out, raw + b"\n")

    assert await pipes.close() == [("stdout", level, text)]


async def test_a_line_in_pieces_is_one_line(pipes: Pipes) -> None:
    """Whatever the pipe makes of it."""
    for piece in (b"a", b"bc", b"", b"d\ne", b"f\n"):
        await write(pipes.out, piece)

    assert [text for _, _, text in await pipes.close()] == ["abcd", "ef"]


async def test_the_last_line_needs_no_end(pipes: Pipes) -> None:
    """It is often the most interesting one."""
    await write(pipes.out, b"before\nSegmentation fa")

    assert [text for _, _, text in await pipes.close()] == ["before", "Segmentation fa"]


async def test_bytes_that_are_no_text_are_shown(pipes: Pipes) -> None:
    """And a carriage return before the line's end is none of it."""
    await write(pipes.out, b"\xff\xfe\x00\r\n")

    assert await pipes.close() == [("stdout", "INFO", "\\xff\\xfe\x00")]


async def test_a_long_line_is_cut(pipes: Pipes) -> None:
    """With or without an end."""
    await write(pipes.out, b"x" * (MAX_LINE_BYTES * 3) + b"\nshort\n")

    texts = [text for _, _, text in await pipes.close()]
    assert texts[-1] == "short"
    assert all(len(text) <= MAX_LINE_BYTES for text in texts)


async def test_a_line_without_end_is_not_kept_for_ever(pipes: Pipes) -> None:
    """Two megabytes without a line end take no two megabytes."""
    await write(pipes.out, b"y" * 2_000_000)

    texts = [text for _, _, text in await pipes.close()]
    assert texts
    assert all(0 < len(text) <= MAX_LINE_BYTES for text in texts)


async def test_the_newest_lines_are_kept(pipes: Pipes) -> None:
    """They say why a worker died."""
    await write(pipes.out, b"".join(b"line %d\n" % number for number in range(100)))
    await pipes.close()

    assert pipes.output.last_lines == [f"line {number}" for number in range(100 - KEPT_LINES, 100)]


async def test_what_stands_before_a_crashs_stack_is_kept(pipes: Pipes) -> None:
    """C++ says why it ends, and then Python prints up to a hundred frames."""
    frames = b"".join(b"  File x, line %d\n" % number for number in range(100))
    await write(pipes.err, b"what():  std::bad_alloc\n" + frames)
    await pipes.close()

    assert pipes.output.last_errors[0] == "what():  std::bad_alloc"
    assert len(pipes.output.last_lines) == KEPT_LINES


async def test_a_burst_arrives_whole_and_in_bounded_pieces(pipes: Pipes) -> None:
    """As a model prints while it loads: more than the pipe holds, in pieces of a turn each."""
    line = b"z" * 99 + b"\n"
    await write(pipes.out, line * 3000)

    assert len(await pipes.close()) == 3000
    assert max(map(len, pipes.log.pieces)) <= BYTES_A_TURN // len(line)


async def test_a_flood_is_cut_with_a_count(pipes: Pipes) -> None:
    """Every line of two bytes is either in the log or counted there; each piece is a turn's at most."""
    total = 1_000_000
    pipes.log.budget.allowance().admit(time.monotonic(), 0, SHARED_BURST_BYTES - 100_000)  # others print, too
    await write(pipes.out, b"x\n" * total)

    lines = await pipes.close()

    counts = [text.split() for stream, level, text in lines if (stream, level) == ("stderr", "WARNING")]
    left_out = sum(int(words[0]) for words in counts)
    assert len([text for _, _, text in lines if text == "x"]) + left_out == total
    assert left_out == pipes.log.budget.left_out > total / 2
    assert counts[0][1:] == (
        f"lines ({2 * int(counts[0][0])} bytes) of this worker were left out: it prints more than the log takes".split()
    )
    assert max(map(len, pipes.log.pieces)) <= LINES_A_TURN
    assert pipes.output.last_lines == ["x"] * KEPT_LINES


async def test_a_pipe_rests_after_each_turn(pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read for every line that comes would take all of the loop's time."""
    rests: list[float] = []
    next_turn = Turns.next

    def note(turns: Turns, now: float, spent_s: float) -> float:
        rests.append(next_turn(turns, now, spent_s) - now)
        return now + rests[-1]

    monkeypatch.setattr(Turns, "next", note)
    began = time.monotonic()
    for _ in range(300):
        await write(pipes.out, b"x\n")
    span_s = time.monotonic() - began

    assert len([text for _, _, text in await pipes.close() if text == "x"]) == 300
    assert min(rests) >= TURN_S * 0.99
    assert len(rests) <= span_s / TURN_S + 2


async def test_turns_are_as_small_as_their_cost_asks(pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long to read is taken in smaller pieces."""
    monkeypatch.setattr(TurnSize, "note", lambda size, spent_s: setattr(size, "bytes", 600))
    await write(pipes.out, b"z" * 99 + b"\n")
    while not pipes.log.lines:
        await asyncio.sleep(0)
    await write(pipes.out, (b"z" * 99 + b"\n") * 100)
    while len(pipes.log.lines) < 101:
        await asyncio.sleep(0)

    assert max(map(len, pipes.log.pieces)) == 6


async def test_errors_and_the_newest_lines_of_a_flood_are_known(pipes: Pipes) -> None:
    """What the worker's logging calls an error is in the log although the worker is cut."""
    cut(pipes)
    await write(pipes.out, b"x\n" * 5000 + b"\x1eERROR\x1ethe reason\n" + b"y\n" * 5000 + b"the end\n")

    lines = await pipes.close()

    assert ("stdout", "ERROR", "the reason") in lines
    assert lines[-1][2].startswith("10001 lines (")
    assert pipes.output.last_lines[-2:] == ["y", "the end"]


async def test_that_a_worker_prints_a_lot_is_told_but_not_of_each_turn() -> None:
    """Once it begins, then once a second; a few lines are nothing."""
    told: list[tuple[float, float, int]] = []
    output = WorkerOutput("m", "1.0", "9000", KeptLines(), lambda *burst: told.append(burst))
    out, err = await output.open()
    await write(out, b"a line\n" * 100)
    await write(out, b"x" * 99 + b"\n")
    assert told == []

    began = time.monotonic()
    await write(out, (b"y" * 99 + b"\n") * (4 * LOUD_BYTES // 100))
    os.close(out)
    os.close(err)
    await output.drained(5.0)
    ended = time.monotonic()

    assert 1 <= len(told) <= 2 + (ended - began)
    assert all(begin <= end <= ended and size >= LOUD_BYTES for begin, end, size in told)


async def test_a_quiet_worker_is_logged_beside_floods() -> None:
    """Four workers print without end; what another one says is in the log, soon and whole."""
    log = KeptLines()
    loud = [WorkerOutput("loud", "1.0", str(number), log) for number in range(4)]
    quiet = WorkerOutput("quiet", "1.0", "9000", log)
    ends = [end for output in loud for end in await output.open()]
    outs, over = ends[::2], threading.Event()
    threads = [threading.Thread(target=_flood, args=(out, over)) for out in outs]
    for thread in threads:
        thread.start()
    try:
        out, err = await quiet.open()
        for number in range(5):
            os.write(out, b"line %d\n" % number)
            async with asyncio.timeout(5):
                while not any(line.text == f"line {number}" for line in log.lines):
                    await asyncio.sleep(0.001)
    finally:
        over.set()
        await asyncio.gather(*(output.drained(0.0) for output in loud))
        for thread in threads:
            await asyncio.to_thread(thread.join)
        for end in (*ends, out, err):
            os.close(end)
        await quiet.drained(5.0)

    assert [line.text for line in log.lines if line.model == "quiet"] == [f"line {number}" for number in range(5)]


def _flood(descriptor: int, over: threading.Event) -> None:
    with contextlib.suppress(BrokenPipeError):
        while not over.is_set():
            os.write(descriptor, b"x\n" * 16_000)


def cut(pipes: Pipes) -> None:
    """Use up what the log takes, so that the next line is one too many."""
    others, now = pipes.log.budget.allowance(), time.monotonic()
    while others.admit(now, 0, 1 << 20):
        pass
    own = pipes.output._allowance
    while own.admit(now, 0, 1 << 18):
        pass


async def test_the_last_words_are_in_though_the_pipe_rests(pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the worker has ended nothing waits for a turn, and the traceback that it ended with is logged whole."""
    monkeypatch.setattr(Turns, "next", lambda turns, now, spent_s: now + 3600)
    await write(pipes.err, b"first\n")
    while not pipes.log.lines:
        await asyncio.sleep(0)
    await write(pipes.err, b"".join(b"frame %d\n" % number for number in range(1000)) + b"ValueError: no")

    texts = [text for _, _, text in await pipes.close()]

    assert texts == ["first", *(f"frame {number}" for number in range(1000)), "ValueError: no"]


async def test_at_the_end_a_bounded_number_of_turns_is_taken(pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a flood is counted, and its newest lines are kept."""
    monkeypatch.setattr(Turns, "next", lambda turns, now, spent_s: now + 3600)
    await write(pipes.err, b"first\n")
    while not pipes.log.lines:
        await asyncio.sleep(0)
    await write(pipes.err, b"x\n" * 30_000 + b"last\n")

    lines = await pipes.close()

    assert len(lines) <= 2 + LAST_TURNS * LINES_A_TURN
    assert lines[-1][2].startswith(f"{30_001 - (len(lines) - 2)} lines (")
    assert pipes.output.last_lines[-1] == "last"


async def test_of_many_tracebacks_some_are_left_out(pipes: Pipes) -> None:
    """Clients cause them, with requests that are a hundredth of the size; each failure has its sentence."""
    traceback = "Traceback\n" + "  frame\n" * 500

    for number in range(300):
        pipes.output.log_failure(f"Request {number}: no", traceback)
    pipes.output.log_failure("Request x: the author's answer", "")

    texts = pipes.log.texts
    assert [text for text in texts if text.startswith("Request")] == [
        *(f"Request {number}: no" for number in range(300)),
        "Request x: the author's answer",
    ]
    assert 1 <= texts.count("Traceback") <= 200
    assert texts.count("Traceback") + len([text for text in texts if "left out" in text]) == 300
    assert {line.level for line in pipes.log.lines[:-1]} == {"ERROR"}
    assert pipes.log.lines[-1].level == "INFO"


async def test_draining_ends_though_somebody_holds_the_pipe() -> None:
    """A process that the worker left behind must not keep it."""
    output = WorkerOutput("m", "1.0", "9000", KeptLines())
    out, err = await output.open()

    await asyncio.wait_for(output.drained(0.05), 5.0)

    os.close(out)
    os.close(err)
    await asyncio.sleep(0)


async def test_a_lack_of_descriptors_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pipe could not be had: the first one is closed again."""
    made: list[tuple[int, int]] = []
    real = os.pipe

    def pipe(*_: Any) -> tuple[int, int]:
        if made:
            raise OSError(24, "Too many open files")
        made.append(real())
        return made[0]

    monkeypatch.setattr(os, "pipe", pipe)
    output = WorkerOutput("m", "1.0", "9000", KeptLines())

    with pytest.raises(OSError, match="Too many open files"):
        await output.open()
    await output.drained(5.0)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0][1])


async def test_each_rank_of_a_group_has_lines_of_its_own(pipes: Pipes) -> None:
    """In the log under the worker's number and its own; what is kept is that of the rank to ask."""
    out, err = await pipes.output.open(1)
    await write(pipes.out, b"zero\n" * 3)
    await write(out, b"one\n")
    await write(err, b"rest")
    os.close(out)
    os.close(err)
    await pipes.close()

    assert {(line.worker_id, line.text) for line in pipes.log.lines} == {
        ("9000", "zero"),
        ("9000.1", "one"),
        ("9000.1", "rest"),
    }
    assert pipes.output.last_lines == ["zero"] * 3
    pipes.output.teller = 1
    assert sorted(pipes.output.last_lines) == ["one", "rest"]


def test_a_descriptor_that_the_loop_closes_is_not_closed_again() -> None:
    """uvloop closes it and calls `close` then: its number may be that of another thread's file by that time."""
    read_end, write_end = os.pipe()
    os.close(write_end)

    ReadEnd(read_end, closes_itself=True).close()
    os.fstat(read_end)  # raises where it is closed

    end = ReadEnd(read_end, closes_itself=False)
    end.close()
    end.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs the list of descriptors")
def test_nothing_is_left_open_under_uvloop() -> None:
    """It is the loop that servers run on."""

    async def read() -> None:
        for _ in range(3):
            output = WorkerOutput("m", "1.0", "9000", KeptLines())
            for end in await output.open():
                os.write(end, b"a line\n")
                os.close(end)
            await output.drained(5)
            assert output.last_lines == ["a line", "a line"]
        await asyncio.sleep(0)

    uvloop.run(read())  # once, for what is opened for good
    before = len(os.listdir("/proc/self/fd"))
    uvloop.run(read())

    assert len(os.listdir("/proc/self/fd")) == before
