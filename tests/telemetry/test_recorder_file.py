"""The recorder's file, which outlives its server."""

from __future__ import annotations

import errno
import os
import signal
import stat
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.messages import Work
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.recorder import FiledRecorder, of_id
from marserve.telemetry.recorder_file import (
    SLOT_BYTES,
    SLOTS_AT,
    FileUnusable,
    RecordedFile,
    RecordedIds,
    RecorderFile,
    previous_of,
)
from marserve.telemetry.timeline import BatchTimes, Timeline, seconds_by_stage
from marserve.telemetry.trace_context import Trace

M = StageSeconds("m", "1.0", (0.1,))


def request(name: str, began: float = 100.0, batch: BatchTimes | None = None) -> Timeline:
    """A request that has ended."""
    timeline = Timeline(name, began, 7, "theirs", admitted_at=began + 0.1, of=M)
    if batch is None:
        batch = BatchTimes("9000/0", 1, began + 0.3, is_first=True)
        batch.land(began + 1.0, 0.5, Work(began + 0.35, 0.01, 0.02, 0.1, 0.2, 0.3))
    timeline.left_in(batch)
    timeline.end(began + 1.1, 500, 5, "handler")
    return timeline


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    """With stages, batch and names."""
    path = tmp_path / "requests"
    written = request("a")
    file = RecorderFile(path, 1 << 20)
    file.write(written)
    file.close()

    (read,) = RecordedFile.at(path)

    assert (read.id, read.client_id, read.model, read.version) == ("a", "theirs", "m", "1.0")
    assert (read.bytes_in, read.bytes_out, read.status, read.error, read.runs) == (7, 5, 500, "handler", 1)
    assert seconds_by_stage(read) == pytest.approx(seconds_by_stage(written), abs=1e-6)
    assert read.began == pytest.approx(100.0, abs=0.01)
    assert read.last is not None
    assert written.last is not None
    assert (read.last.worker, read.last.size, read.last.is_first) == ("9000/0", 1, True)
    assert read.last.handler_s == pytest.approx(0.5)
    assert read.last.work is not None
    work = read.last.work
    assert (work.collected_s, work.waited_s, work.printed_s) == pytest.approx((0.1, 0.2, 0.3))


def test_how_long_a_client_held_a_stream_is_read_again(tmp_path: Path) -> None:
    """So that the server's end does not lose who was slow."""
    written = request("a")
    written.hold(100.5)
    written.resume(100.9)
    file = RecorderFile(tmp_path / "requests", 1 << 20)
    file.write(written)
    file.close()

    (read,) = RecordedFile.at(tmp_path / "requests")

    assert read.held_s == pytest.approx(0.4)


def test_a_file_of_the_release_before_is_read(tmp_path: Path) -> None:
    """Its slots are shorter."""
    path = tmp_path / "requests"
    file = RecorderFile(path, 1 << 20)
    for name in ("a", "b"):
        file.write(request(name))
    file.close()
    data = path.read_bytes()
    slots = [data[at : at + 384] for at in range(SLOTS_AT, len(data), SLOT_BYTES)]
    head = struct.pack("<32sII", b"marserve requests", 1, len(slots)).ljust(4096, b"\0")
    cut = [slot[:383] + b"\0" for slot in slots]
    path.write_bytes(head + data[4096:SLOTS_AT] + b"".join(cut))

    assert [(each.id, each.held_s) for each in RecordedFile.at(path)] == [("a", 0.0), ("b", 0.0)]


def test_the_file_of_the_server_before_is_read_once_for_ids_that_are_not_there(tmp_path: Path) -> None:
    """However often somebody asks; those that are there are known by each of their ids."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    traced, long_id = request("a"), "x" * 128
    traced.trace = Trace(f"{trace_id}{1:032x}", 1)
    file = RecorderFile(tmp_path / "requests", 1 << 20)
    for each in (traced, request(long_id), request("b")):
        file.write(each)
    file.close()
    ids = RecordedIds(tmp_path / "requests")

    assert [ids.has(each) for each in ("a", "b", long_id, "theirs", trace_id)] == [True] * 5
    (tmp_path / "requests").unlink()
    assert [ids.has(each) for each in ("a", "c", "", "0" * 32)] == [True, False, False, False]
    assert not RecordedIds(tmp_path / "no-such").has("a")


def test_a_request_is_found_by_its_trace_after_the_server_has_gone(tmp_path: Path) -> None:
    """One without a trace has none then, too."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    traced = request("a")
    traced.trace = Trace(f"{trace_id}{1:032x}", 1)
    file = RecorderFile(tmp_path / "requests", 1 << 20)
    file.write(traced)
    file.write(request("b"))
    file.close()

    known = list(RecordedFile.at(tmp_path / "requests"))

    assert [each.id for each in of_id(trace_id, known)] == ["a"]
    assert known[1].trace is None


def test_mates_share_their_batch(tmp_path: Path) -> None:
    """As they did when they were written."""
    file = RecorderFile(tmp_path / "requests", 1 << 20)
    batch = BatchTimes("9000/0", 2, 100.3)
    for name in ("a", "b"):
        file.write(request(name, batch=batch))
    file.write(request("c"))
    file.close()

    a, b, c = RecordedFile.at(tmp_path / "requests")

    assert a.last is b.last is not c.last


def test_a_request_that_nobody_took_is_kept_too(tmp_path: Path) -> None:
    """Without model and batch."""
    refused = Timeline("a", 100.0)
    refused.end(100.1, 404, 0, "error")
    file = RecorderFile(tmp_path / "requests", 1 << 20)
    file.write(refused)
    file.close()

    (read,) = RecordedFile.at(tmp_path / "requests")

    assert (read.model, read.first, read.last, read.status) == ("", None, None, 404)
    assert seconds_by_stage(read) == pytest.approx(seconds_by_stage(refused), abs=1e-6)


def test_the_newest_stay_and_the_file_does_not_grow(tmp_path: Path) -> None:
    """It is a ring."""
    path = tmp_path / "requests"
    file = RecorderFile(path, SLOTS_AT + 100 * SLOT_BYTES)
    size = path.stat().st_size
    for number in range(1000):
        file.write(request(str(number), 100.0 + number))
    file.close()

    assert [each.id for each in RecordedFile.at(path)] == [str(number) for number in range(900, 1000)]
    assert path.stat().st_size == size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_words_beyond_their_room_are_empty(tmp_path: Path) -> None:
    """A server with a hundred thousand models that come and go writes on."""
    file = RecorderFile(tmp_path / "requests", 1 << 20)
    for number in range(3000):
        timeline = request(str(number))
        timeline.of = StageSeconds(f"model-{number:060}", "1.0", (0.1,))
        file.write(timeline)
    file.close()

    read = list(RecordedFile.at(tmp_path / "requests"))

    assert len(read) > 2000
    assert read[-1].model == ""


def test_it_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    """Nothing was closed or flushed."""
    path = tmp_path / "requests"
    child = os.fork()
    if not child:
        file = RecorderFile(path, 1 << 20)
        for number in range(10):
            file.write(request(str(number)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)

    assert [each.id for each in RecordedFile.at(path)] == [str(number) for number in range(10)]


def test_a_file_that_somebody_cuts_short_ends_no_server(tmp_path: Path) -> None:
    """A mapped one would, by SIGBUS. In a process of its own, which that signal would end."""
    path = tmp_path / "requests"
    child = os.fork()
    if not child:
        status = 1
        try:
            file = RecorderFile(path, 1 << 20)
            os.truncate(path, 0)
            file.write(request("a"))
            file.close()
            status = 0
        finally:
            os._exit(status)

    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(FileUnusable):
        RecordedFile.at(path)


def test_a_write_that_the_system_refuses_is_told_once_and_ends_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a disk that became full, or a network that went. Words of it are known once they are written."""
    path = tmp_path / "requests"
    file = RecorderFile(path, 1 << 20)

    def refuse(descriptor: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", refuse)
        file.write(request("a"))
        file.write(request("b"))
    file.write(request("c"))
    file.close()

    assert [each.getMessage() for each in caplog.records] == [
        f"{path} cannot be written: No space left on device; requests are missing there until it can be"
    ]
    (read,) = RecordedFile.at(path)
    assert (read.id, read.model, read.version) == ("c", "m", "1.0")


def test_the_server_before_leaves_its_file_beside(tmp_path: Path) -> None:
    """The new server begins an empty one."""
    path = tmp_path / "requests"
    first = FiledRecorder(1 << 20, path)
    first.take(request("before"))
    first.close()

    second = FiledRecorder(1 << 20, path)
    second.take(request("now"))

    assert [each.id for each in second.previous()] == ["before"]
    assert [each.id for each in second] == ["now"]
    assert previous_of(path).exists()
    second.close()


def test_without_a_file_there_is_no_server_before(tmp_path: Path) -> None:
    """Or with one that is none of ours."""
    recorder = FiledRecorder(1 << 20, tmp_path / "requests")
    assert recorder.previous() == []
    previous_of(tmp_path / "requests").write_bytes(b"x" * 100_000)
    assert recorder.previous() == []
    recorder.close()


def test_two_servers_cannot_have_one_file(tmp_path: Path) -> None:
    """The second is told."""
    file = RecorderFile(tmp_path / "requests", 1 << 20)

    with pytest.raises(FileUnusable, match="belongs to another server that runs"):
        RecorderFile(tmp_path / "requests", 1 << 20)

    file.close()


@pytest.mark.parametrize("what", ["folder", "link", "fifo", "nowhere"])
def test_what_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    """A link might lead to a file of somebody else's."""
    path = tmp_path / "requests"
    if what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to(tmp_path / "other")
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path = tmp_path / "nowhere" / "requests"

    with pytest.raises(FileUnusable, match=str(path)):
        RecorderFile(path, 1 << 20)

    assert not (tmp_path / "other").exists()


@given(st.binary(max_size=5000) | st.integers(0, 4000).map(lambda at: _changed(at)))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """A file that a crash, or somebody, has changed ends no server."""
    try:
        read = list(RecordedFile(data))
    except FileUnusable:
        return
    for timeline in read:
        seconds_by_stage(timeline)


_WHOLE: list[bytes] = []


def _changed(at: int) -> bytes:
    """A whole file with a few bytes changed."""
    if not _WHOLE:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            file = RecorderFile(Path(folder) / "f", 1)
            for number in range(20):
                file.write(request(str(number)))
            file.close()
            _WHOLE.append((Path(folder) / "f").read_bytes())
    data = bytearray(_WHOLE[0])
    place = at % 100 if at < 500 else 4096 + at % 200 if at < 1000 else SLOTS_AT + SLOT_BYTES + at
    data[place : place + 8] = b"\xff\x00\xfe\x80\x7f\xc0\x01\xaa"
    return bytes(data)
