"""The record of what was fetched: what is deleted, and what is the operator's."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest

from marserve.store.fetching import fetched_archives
from marserve.store.fetching.fetched_archives import RECORD, FetchedArchives


def fetch(record: FetchedArchives, path: Path, data: bytes = b"fetched") -> Path:
    """Put a file there as a download does: noted first."""
    record.note(path, hashlib.sha256(data).hexdigest(), f"https://models.example/{path.name}")
    path.write_bytes(data)
    record.placed(path)
    return path


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_was_fetched_is_deleted_once(tmp_path: Path, is_restarted: bool) -> None:
    """By the process that fetched it, and by the next."""
    record = FetchedArchives(tmp_path / "state")
    path = fetch(record, tmp_path / "m.mar")
    if is_restarted:
        record = FetchedArchives(tmp_path / "state")

    assert record.knows(path)
    assert record.delete(path)
    assert not path.exists()
    assert not record.knows(path)
    path.write_bytes(b"fetched")
    assert not record.delete(path)
    assert path.exists()
    assert FetchedArchives(tmp_path / "state").knows(path) is False


def test_what_the_operator_put_there_stays(tmp_path: Path) -> None:
    """Never fetched, or replaced since: by another file, by a link, by a folder; then it is forgotten."""
    record = FetchedArchives(None)
    replaced, link, folder = (fetch(record, tmp_path / name) for name in ("a.mar", "b.mar", "c.mar"))
    replaced.write_bytes(b"another")
    (tmp_path / "mine.mar").write_bytes(b"fetched")
    link.unlink()
    link.symlink_to(tmp_path / "mine.mar")
    folder.unlink()
    folder.mkdir()

    assert [record.delete(path) for path in (replaced, link, folder, tmp_path / "mine.mar")] == [False] * 4
    assert [path.name for path in (replaced, link, folder) if record.knows(path)] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mar", "b.mar", "c.mar", "mine.mar"]


def test_an_operators_file_with_the_same_bytes_stays(tmp_path: Path) -> None:
    """A copy of what was fetched, moved or written into its place: by the next start, too."""
    record = FetchedArchives(tmp_path / "state")
    moved, written, kept = (fetch(record, tmp_path / name) for name in ("a.mar", "b.mar", "c.mar"))
    (tmp_path / "mine").write_bytes(b"fetched")
    (tmp_path / "mine").replace(moved)
    os.utime(written, ns=(0, written.stat().st_mtime_ns + 1_000_000_000))
    os.utime(kept, ns=(0, kept.stat().st_mtime_ns))  # read, and not written
    record = FetchedArchives(tmp_path / "state")

    assert [record.delete(path) for path in (moved, written, kept)] == [False, False, True]
    assert (moved.read_bytes(), written.read_bytes(), kept.exists()) == (b"fetched", b"fetched", False)


def test_a_record_of_digests_alone_is_read(tmp_path: Path) -> None:
    """As an earlier version wrote it: the digest decides."""
    path = tmp_path / "m.mar"
    path.write_bytes(b"fetched")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / RECORD).write_text(json.dumps({str(path): hashlib.sha256(b"fetched").hexdigest()}))
    record = FetchedArchives(tmp_path / "state")

    assert record.address_of(path) == ""
    assert record.delete(path)


def test_a_crash_between_note_and_place_leaves_the_digest(tmp_path: Path) -> None:
    """The file may have its name already; it is deleted as one that was placed."""
    path = tmp_path / "m.mar"
    FetchedArchives(tmp_path / "state").note(
        path, hashlib.sha256(b"fetched").hexdigest(), "https://models.example/m.mar"
    )
    path.write_bytes(b"fetched")

    assert FetchedArchives(tmp_path / "state").delete(path)


def test_where_a_file_came_from_is_remembered(tmp_path: Path) -> None:
    """For a start that finds its name in the store."""
    path = fetch(FetchedArchives(tmp_path / "state"), tmp_path / "m.mar")

    assert FetchedArchives(tmp_path / "state").address_of(path) == "https://models.example/m.mar"
    assert FetchedArchives(tmp_path / "state").address_of(tmp_path / "other.mar") is None


def test_a_file_that_the_operator_put_there_meanwhile_is_not_taken_for_a_fetched_one(tmp_path: Path) -> None:
    """Even one with the same bytes as what was fetched, and got no name because of it."""
    record = FetchedArchives(None)
    path = tmp_path / "m.mar"
    path.write_bytes(b"fetched")
    record.note(path, hashlib.sha256(b"fetched").hexdigest(), "")
    record.placed(path)

    assert not record.knows(path)
    assert not record.delete(path)
    assert path.exists()


def test_a_record_holds_wherever_the_next_start_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model store may be named from the working directory."""
    monkeypatch.chdir(tmp_path)
    fetch(FetchedArchives(tmp_path / "state"), Path("m.mar"))
    monkeypatch.chdir("/")

    assert FetchedArchives(tmp_path / "state").delete(tmp_path / "m.mar")


def test_a_pipe_in_its_place_does_not_hold_anything_up(tmp_path: Path) -> None:
    """It is not waited for."""
    record = FetchedArchives(None)
    path = fetch(record, tmp_path / "m.mar")
    path.unlink()
    os.mkfifo(path)

    assert not record.delete(path)
    assert path.exists()


def test_a_file_that_is_there_keeps_its_record(tmp_path: Path) -> None:
    """A second download of the name cannot take its place; one that is gone can be fetched anew."""
    record = FetchedArchives(None)
    path = fetch(record, tmp_path / "m.mar")
    record.note(path, "0" * 64, "")
    assert record.delete(path)

    fetch(record, path, b"new")
    path.unlink()
    fetch(record, path, b"newer")
    assert record.delete(path)


def test_a_record_that_cannot_be_read_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server starts, and says so; the next download writes a good one."""
    path = tmp_path / "m.mar"
    path.write_bytes(b"fetched")
    for text in (b"{", b"[1]", b"\xff", json.dumps({str(path): 1}).encode()):
        (tmp_path / RECORD).write_bytes(text)
        record = FetchedArchives(tmp_path)
        assert not record.delete(path)
    assert caplog.text.count("cannot be read") == 4
    other = fetch(record, tmp_path / "n.mar")

    assert FetchedArchives(tmp_path).knows(other)


def test_a_record_that_cannot_be_written_counts_for_this_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The state folder is a file, say; nothing half is left."""
    (tmp_path / "state").write_text("")
    record = FetchedArchives(tmp_path / "state")

    assert record.delete(fetch(record, tmp_path / "m.mar"))
    assert "cannot be written" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_the_record_is_whole_and_alone_in_its_folder(tmp_path: Path) -> None:
    """Written beside and renamed."""
    record = FetchedArchives(tmp_path / "state")
    for name in ("a.mar", "b.mar"):
        fetch(record, tmp_path / name)

    assert [path.name for path in (tmp_path / "state").iterdir()] == [RECORD]


def test_the_record_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are gone are forgotten first, then the oldest."""
    monkeypatch.setattr(fetched_archives, "MOST_REMEMBERED", 2)
    record = FetchedArchives(tmp_path / "state")
    paths = [fetch(record, tmp_path / f"{number}.mar") for number in range(2)]
    paths[1].unlink()
    paths.append(fetch(record, tmp_path / "2.mar"))
    assert [path.name for path in paths if record.knows(path)] == ["0.mar", "2.mar"]
    paths.append(fetch(record, tmp_path / "3.mar"))

    assert [path.name for path in paths if record.knows(path)] == ["2.mar", "3.mar"]
    assert [path.name for path in paths if FetchedArchives(tmp_path / "state").knows(path)] == ["2.mar", "3.mar"]


def test_what_was_never_placed_is_not_told_to_be_deleted(tmp_path: Path) -> None:
    """A store that cannot be written, say: it was noted before, and is forgotten."""
    record = FetchedArchives(None)
    record.note(tmp_path / "m.mar", "0" * 64, "")

    assert not record.delete(tmp_path / "m.mar")
    assert not record.knows(tmp_path / "m.mar")


def test_what_a_crash_left_of_the_record_goes_with_the_next_start(tmp_path: Path) -> None:
    """It lies beside the record."""
    (tmp_path / f".{'a' * 16}.part").write_text("{")
    fetch(FetchedArchives(tmp_path), tmp_path / "m.mar")

    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD, "m.mar"]


def test_the_name_of_the_record_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written twice for each file; `tests/files/test_atomic.py` says in which order."""
    synced: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode)))

    fetch(FetchedArchives(tmp_path), tmp_path / "m.mar")

    assert synced == [False, True, False, True]
