"""Tests for what workers print: cutting into lines, levels, bounds, and what is kept of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvloop

from marserve.pool.output import KEPT_LINES, MAX_LINE_BYTES, ReadEnd, WorkerOutput
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


async def test_ten_megabytes_of_lines_all_arrive(pipes: Pipes) -> None:
    """Nothing is dropped here; that is the log's to decide."""
    line = b"z" * 99 + b"\n"
    await write(pipes.out, line * 100_000)

    assert len(await pipes.close()) == 100_000


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
