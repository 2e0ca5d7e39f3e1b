"""The bounded buffer in front of a log: never blocks, loses nothing it need not lose, and counts what it lost."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve.telemetry.logs.line_writer import DescriptorSink, LineWriter, RollingFile
from support.small_disk import small_disk


class GatedSink:
    """Keeps what it is given; waits while the gate is shut; fails while told to."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fails = False
        self.failed = threading.Semaphore(0)
        self.is_closed = False

    def write(self, data: bytes, give_up: threading.Event) -> None:
        """Take `data`, once the gate is open."""
        self.entered.set()
        while not self.gate.wait(0.01):
            if give_up.is_set():
                raise BrokenPipeError
        if self.fails:
            self.failed.release()
            raise OSError(28, "No space left on device")
        self.written += data

    def close(self) -> None:
        """Note that it was closed."""
        self.is_closed = True


def start_writer(sink: object, capacity: int = 1000) -> LineWriter[str]:
    """A started writer of plain strings."""
    writer = LineWriter("test", sink, "\n".join, lambda count: f"{count} lost", capacity, linger_s=0)  # type: ignore[arg-type]
    writer.start()
    return writer


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("log-")]


def test_lines_come_out_in_order_and_closing_writes_the_rest() -> None:
    """Nothing that was accepted is lost by an orderly end."""
    sink = GatedSink()
    writer = start_writer(sink)

    for number in range(500):
        writer.write(f"line {number}")
    writer.close(5)

    assert sink.written.decode().splitlines() == [f"line {n}" for n in range(500)]
    assert sink.is_closed
    assert writer.dropped == 0


def test_finished_lines_and_records_keep_their_order() -> None:
    """Finished lines are joined on the way in and records encoded on the way out: neither overtakes the other."""
    sink = GatedSink()
    writer = LineWriter(
        "test", sink, lambda records: "\n".join(f"record {r}" if isinstance(r, int) else r for r in records), int,
        linger_s=0.001,
    )  # fmt: skip
    writer.start()

    for number in range(20_000):
        if number % 300 == 299:
            writer.write(number)
        else:
            writer.write(f"line {number}")
    writer.close(5)

    kinds = ["record" if n % 300 == 299 else "line" for n in range(20_000)]
    assert sink.written.decode().splitlines() == [f"{kind} {n}" for n, kind in enumerate(kinds)]
    assert writer.dropped == 0


def test_finished_lines_are_bounded_too() -> None:
    """Joined or not, no more lines wait than there is room for; each that is dropped is counted."""
    sink = GatedSink()
    sink.gate.clear()
    writer = start_writer(sink, capacity=200)
    writer.write("first")
    assert sink.entered.wait(5)

    for number in range(1000):
        writer.write(f"line {number}")
    assert writer.dropped == 800
    sink.gate.set()
    writer.close(5)

    assert sink.written.decode().splitlines() == ["first", "800 lost", *(f"line {n}" for n in range(200))]


def test_a_disk_that_fails_loses_joined_lines_by_the_count() -> None:
    """What a piece held is counted line by line."""
    sink = GatedSink()
    sink.gate.clear()
    sink.fails = True
    writer = start_writer(sink)
    for number in range(150):
        writer.write(f"line {number}")

    sink.gate.set()
    writer.close(5)

    assert writer.dropped == 150
    assert not sink.written


def test_lines_that_come_together_keep_their_order_and_are_counted() -> None:
    """Among records and lines that come alone; while nothing is written, each of them takes room of its own."""
    sink = GatedSink()
    sink.gate.clear()
    writer = start_writer(sink, capacity=200)
    writer.write("first")
    assert sink.entered.wait(5)

    writer.write("a")
    writer.write_lines("b\nc\nd", 3)
    writer.write("e")
    writer.write_lines("\n".join(["f"] * 195), 195)
    writer.write_lines("g\nh", 2)
    assert writer.dropped == 2
    writer.write("i")
    assert writer.dropped == 3
    sink.gate.set()
    writer.close(5)

    assert sink.written.decode().splitlines() == ["first", "3 lost", "a", "b", "c", "d", "e", *["f"] * 195]


def test_lines_that_come_together_are_not_written_all_at_once() -> None:
    """After a stall the other threads get their turn between two writes."""
    sink = GatedSink()
    writes: list[int] = []
    write = sink.write

    def note(data: bytes, give_up: threading.Event) -> None:
        writes.append(data.count(b"\n"))
        write(data, give_up)

    sink.write = note  # type: ignore[method-assign]
    sink.gate.clear()
    writer = start_writer(sink, capacity=30_000)
    writer.write("first")
    assert sink.entered.wait(5)
    for _ in range(100):
        writer.write_lines("\n".join("x" * 256), 256)

    sink.gate.set()
    writer.close(5)

    assert sum(writes) == 25_601
    assert max(writes) <= 4096


def test_lines_that_come_together_are_bounded_in_bytes() -> None:
    """A worker that floods a log whose disk is full fills no memory with it."""
    sink = GatedSink()
    sink.gate.clear()
    writer = start_writer(sink, capacity=1_000_000)
    writer.write("first")
    assert sink.entered.wait(5)
    text = "\n".join(["x" * 8191] * 8)

    for _ in range(1000):
        writer.write_lines(text, 8)
    assert writer.dropped == 8 * (1000 - (16 << 20) // len(text))
    sink.gate.set()
    writer.close(5)

    assert len(sink.written) < (16 << 20) + 100_000
    assert sink.written.count(b"\n") + writer.dropped == 8002


def test_a_disk_that_fails_loses_lines_that_came_together_by_the_count() -> None:
    """Not by the piece."""
    sink = GatedSink()
    sink.gate.clear()
    sink.fails = True
    writer = start_writer(sink)
    for _ in range(5):
        writer.write_lines("a\nb\nc", 3)

    sink.gate.set()
    writer.close(5)

    assert writer.dropped == 15


def test_under_load_the_thread_wakes_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is woken for the first line alone: as long as more come while it waits nobody need say so."""
    sink = GatedSink()
    sink.gate.clear()
    writer = start_writer(sink)
    woken = []
    wake = writer._wake.set
    monkeypatch.setattr(writer._wake, "set", lambda: (woken.append(1), wake()))
    writer.write("first")
    assert sink.entered.wait(5)

    for number in range(100):
        writer.write(f"line {number}")
    assert len(woken) == 1
    sink.gate.set()
    writer.close(5)

    assert len(sink.written.decode().splitlines()) == 101


def test_a_full_buffer_drops_and_says_so_later() -> None:
    """While nobody takes the lines they are dropped and counted; the log tells how many are missing."""
    sink = GatedSink()
    sink.gate.clear()
    writer = start_writer(sink, capacity=10)
    writer.write("first")
    assert sink.entered.wait(5)

    for number in range(100):
        writer.write(f"line {number}")
    assert writer.dropped == 90
    sink.gate.set()
    writer.close(5)

    assert sink.written.decode().splitlines() == ["first", "90 lost", *(f"line {n}" for n in range(10))]


def test_closing_gives_up_on_a_reader_that_never_comes() -> None:
    """The thread ends at the deadline, and what waited counts as dropped."""
    sink = GatedSink()
    sink.gate.clear()
    writer = start_writer(sink)
    writer.write("stuck")
    assert sink.entered.wait(5)
    writer.write("waiting")

    writer.close(0.05)

    assert writer.dropped == 2
    assert sink.is_closed
    writer.write("too late")
    assert writer.dropped == 3


def test_a_disk_that_is_full_does_not_end_the_log() -> None:
    """Lines are lost while writing fails; afterwards the log goes on."""
    sink = GatedSink()
    sink.fails = True
    writer = start_writer(sink)
    writer.write("lost")
    assert sink.entered.wait(5)
    sink.fails = False

    writer.write("kept")
    writer.close(5)

    assert writer.dropped in (0, 1)  # 0 where the sink had recovered before the first write came to its end
    assert "kept" in sink.written.decode()


def test_trouble_is_told_when_it_begins_and_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each, however many batches are lost between; the log itself says how many lines those were."""
    monkeypatch.setattr("marserve.telemetry.logs.line_writer._REST_S", 0.02)
    told: list[str | None] = []
    is_told = threading.Semaphore(0)

    def tell(trouble: str | None) -> None:
        told.append(trouble)
        is_told.release()

    sink = GatedSink()
    sink.fails = True
    writer: LineWriter[str] = LineWriter(
        "test", sink, "\n".join, lambda count: f"{count} lost", linger_s=0, on_trouble=tell
    )
    writer.start()
    writer.write("lost")
    assert is_told.acquire(timeout=5)
    assert sink.failed.acquire(timeout=5)
    for number in range(3):
        writer.write(f"{number}")
        assert sink.failed.acquire(timeout=5)
    sink.fails = False
    writer.write("kept")
    assert is_told.acquire(timeout=5)
    writer.close(5)

    assert told == ["No space left on device", None]
    assert sink.written.decode().splitlines() == ["4 lost", "kept"]
    assert writer.dropped == 4


def test_a_line_that_was_cut_off_by_a_full_disk_is_ended_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two lines would become one that neither was."""
    log = RollingFile(tmp_path / "ts_log.log")
    never = threading.Event()
    room = iter([5, 0])

    class Full:
        """A file on a disk with room for some bytes."""

        def write(self, data: memoryview) -> int:
            count = next(room)
            if not count:
                raise OSError(28, "No space left on device")
            return os.write(descriptor, data[:count])

        def close(self) -> None:
            os.close(descriptor)

    descriptor = os.open(tmp_path / "ts_log.log", os.O_WRONLY | os.O_APPEND)
    log.close()
    monkeypatch.setattr(log, "_file", Full())
    with pytest.raises(OSError, match="No space"):
        log.write(b"first line\n", never)

    log.write(b"second line\n", never)
    log.close()

    assert (tmp_path / "ts_log.log").read_text() == "first\nsecond line\n"


def test_a_record_that_cannot_be_encoded_does_not_end_the_thread() -> None:
    """One bad batch is dropped; the writer lives on."""
    sink = GatedSink()
    writer = LineWriter(
        "test", sink, lambda records: "\n".join(str(1 // n) for n in records), lambda count: 1, linger_s=0
    )
    writer.start()

    writer.write(0)
    writer.close(5)

    assert writer.dropped == 1


def test_a_pipe_nobody_reads_does_not_block_the_writing_side() -> None:
    """Standard output may be a pipe to a log collector that has stopped."""
    read_end, write_end = os.pipe()
    writer = start_writer(DescriptorSink(write_end), capacity=100)

    for _ in range(2000):
        writer.write("x" * 1000)
    dropped_while_stuck = writer.dropped
    writer.close(0.2)

    assert dropped_while_stuck > 1000
    assert len(os.read(read_end, 1 << 20)) > 0
    os.close(read_end)
    os.close(write_end)


def test_a_pipe_gets_every_byte_however_slowly_it_is_read() -> None:
    """What there is no room for is written later; whoever else writes to the pipe still blocks as before."""
    read_end, write_end = os.pipe()
    writer = start_writer(DescriptorSink(write_end), capacity=10_000)
    lines = [f"{number} {'x' * 100}" for number in range(5000)]
    for line in lines:
        writer.write(line)

    read = bytearray()
    while read.count(b"\n") < len(lines):
        read += os.read(read_end, 1000)
    writer.close(5)

    assert read.decode().splitlines() == lines
    assert os.get_blocking(write_end)
    os.close(read_end)
    os.close(write_end)


def test_a_reader_that_hangs_up_does_no_harm() -> None:
    """A closed pipe loses lines and nothing else."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    writer = start_writer(DescriptorSink(write_end))

    writer.write("to nobody")
    writer.close(5)

    assert writer.dropped == 1
    os.close(write_end)


def test_a_full_file_is_packed_and_begun_anew(tmp_path: Path) -> None:
    """At its bound a log becomes a dated archive; only the newest few are kept."""
    never = threading.Event()
    log = RollingFile(tmp_path / "ts_log.log", max_bytes=10, keep=2)

    for number in range(4):
        log.write(f"line {number}....\n".encode(), never)
    log.write(b"short\n", never)
    log.close()

    assert (tmp_path / "ts_log.log").read_text() == "short\n"
    packed = sorted(tmp_path.glob("ts_log.*.log.gz"), key=lambda p: p.stat().st_mtime_ns)
    assert [gzip.decompress(p.read_bytes()).decode() for p in packed] == ["line 2....\n", "line 3....\n"]


def test_a_log_of_another_day_is_packed_before_the_next_line(tmp_path: Path) -> None:
    """The archive's name tells the day its lines are of."""
    path = tmp_path / "access_log.log"
    path.write_text("old\n")
    january = 1_769_860_800  # 2026-01-31 12:00 UTC
    os.utime(path, (january, january))

    log = RollingFile(path)
    log.write(b"new\n", threading.Event())
    log.close()

    assert path.read_text() == "new\n"
    assert gzip.decompress((tmp_path / "access_log.31-Jan.log.gz").read_bytes()) == b"old\n"


def test_a_log_without_room_to_be_packed_grows_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No try leaves anything behind or costs a line, and archives of before stay."""
    monkeypatch.setattr("marserve.telemetry.logs.line_writer._ROLL_REST_S", 0.0)
    never = threading.Event()
    dice = random.Random(0)
    lines = [dice.randbytes(4_000).hex().encode() + b"\n" for _ in range(20)]
    with small_disk(tmp_path / "disk", 256) as disk:
        older = disk.folder / "ts_log.01-Jan.log.gz"
        older.write_bytes(gzip.compress(b"older\n"))
        os.utime(older, (0, 0))
        log = RollingFile(disk.folder / "ts_log.log", max_bytes=140_000, keep=2)
        (disk.folder / "ballast").write_bytes(bytes(80_000))
        for line in lines[:19]:
            log.write(line, never)
        grown = {path.name for path in disk.folder.iterdir()}

        disk.empty()
        log.write(lines[19], never)
        log.close()
        archives = sorted(disk.folder.glob("*.gz"), key=lambda path: path.stat().st_mtime_ns)
        packed = [gzip.decompress(path.read_bytes()) for path in archives]
        left = {path.name for path in disk.folder.iterdir()}

    assert grown == {"ts_log.log", "ts_log.01-Jan.log.gz", "ballast"}
    assert packed == [b"older\n", b"".join(lines)]
    assert left == {"ts_log.log", *(path.name for path in archives)}
    assert [record.getMessage() for record in caplog.records] == [
        "ts_log.log cannot be packed (No space left on device): it grows until it can",
        "ts_log.log is packed again",
    ]


def test_yesterdays_log_that_cannot_be_packed_is_tried_again_a_while_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every line, and under the name of its day still."""
    path = tmp_path / "access_log.log"
    path.write_text("old\n")
    january = 1_769_860_800  # 2026-01-31 12:00 UTC
    os.utime(path, (january, january))
    log = RollingFile(path)
    never = threading.Event()
    tries = []

    def fill(full: object, packed: gzip.GzipFile, length: int) -> None:
        tries.append(length)
        packed.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(shutil, "copyfileobj", fill)
        log.write(b"new\n", never)
        log.write(b"newer\n", never)
    assert len(tries) == 1
    assert path.read_text() == "old\nnew\nnewer\n"
    assert list(tmp_path.iterdir()) == [path]

    monkeypatch.setattr(log, "_roll_from", 0.0)
    log.write(b"newest\n", never)
    log.close()

    assert path.read_text() == "newest\n"
    assert gzip.decompress((tmp_path / "access_log.31-Jan.log.gz").read_bytes()) == b"old\nnew\nnewer\n"


def test_a_log_that_somebody_took_away_is_begun_anew_when_it_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is nothing to pack, and what is written must not go to a file without a name."""
    path = tmp_path / "ts_log.log"
    log = RollingFile(path, max_bytes=10)
    never = threading.Event()
    path.unlink()

    log.write(b"to nobody....\n", never)
    log.write(b"short\n", never)
    log.close()

    assert path.read_text() == "short\n"
    assert list(tmp_path.iterdir()) == [path]
    assert not caplog.records
