"""Where the document lies: read whole, noticed when it changes, and written by compare-and-swap or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marserve.desired_state import document_place
from marserve.desired_state.document_place import (
    ABSENT,
    DocumentMissing,
    DocumentUnreadable,
    FilePlace,
    Found,
    ObjectPlace,
)
from marserve.errors import DesiredStateMoved
from marserve.files.locks import locked
from marserve.store.addresses.fetch_guard import parse_target
from marserve.store.sources.object_store import ObjectStores
from marserve.store.sources.source import Broken, Entry, Replaced, Source
from support.object_stores import s3_server


def test_a_file_is_written_in_the_place_of_the_one_that_was_read(tmp_path: Path) -> None:
    """And of no other; what was refused leaves no trace."""
    path = tmp_path / "models.yaml"
    path.write_bytes(b"one")
    path.chmod(0o640)
    place = FilePlace(path)
    first = place.read()

    second = place.write(b"two", first.tag)

    assert (path.read_bytes(), place.read().tag, path.stat().st_mode & 0o777) == (b"two", second, 0o640)
    with pytest.raises(DesiredStateMoved):
        place.write(b"three", first.tag)
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["models.yaml"]


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    """Each writes what it read and one more; who was too late reads again."""
    path = tmp_path / "count"
    path.write_bytes(b"0")

    def count() -> None:
        place = FilePlace(path)
        done = 0
        while done < 20:
            found = place.read()
            try:
                place.write(str(int(found.data) + 1).encode(), found.tag)
                done += 1
            except DesiredStateMoved:
                continue

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert path.read_bytes() == b"80"


def test_a_link_is_followed_and_never_replaced(tmp_path: Path) -> None:
    """As Kubernetes mounts its ConfigMaps: another target is another document."""
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(name.encode())
    link = tmp_path / "models.yaml"
    link.symlink_to("one")
    place = FilePlace(link)
    looked = place.look()

    place.write(b"edited", place.read().tag)
    assert (link.is_symlink(), (tmp_path / "one").read_bytes()) == (True, b"edited")
    link.unlink()
    link.symlink_to("two")

    assert place.read().data == b"two"
    assert place.look() != looked


def test_a_lock_that_another_server_keeps_is_waited_for_with_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stopped while it has the lock: the document stays as it was."""
    monkeypatch.setattr(document_place, "LOCK_LIMIT_S", 0.01)
    place = FilePlace(tmp_path / "models.yaml")

    with (
        locked(tmp_path, within_s=0.0),
        pytest.raises(DocumentUnreadable, match="by another process, which may be stopped"),
    ):
        place.write(b"one", ABSENT)

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_deleted_by_the_next_write(tmp_path: Path) -> None:
    """It lies hidden beside the document, in the operator's folder."""
    (tmp_path / f".{'a' * 16}.part").write_bytes(b"half")

    FilePlace(tmp_path / "models.yaml").write(b"one", ABSENT)

    assert os.listdir(tmp_path) == ["models.yaml"]


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document stays as it was, and nothing is left beside it."""
    path = tmp_path / "models.yaml"
    path.write_bytes(b"one")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DocumentUnreadable, match="cannot be written \\(No space left on device\\)"):
        FilePlace(path).write(b"two", FilePlace(path).read().tag)

    assert os.listdir(tmp_path) == ["models.yaml"]
    assert path.read_bytes() == b"one"


class FakeReading:
    """What a fake source gives."""

    begin = 0

    def __init__(self, source: FakeSource) -> None:
        self.entry = Entry("k", len(source.data), source.etag)
        self._source = source

    def __iter__(self) -> Iterator[bytes]:
        """In two pieces; a replacement is noticed between them."""
        data = self._source.data
        yield data[:1]
        if self._source.replaced:
            self._source.replaced -= 1
            raise Replaced("it is another one")
        yield data[1:]


class FakeSource:
    """An object that is replaced while it is read so many times, or does not answer."""

    shown = identity = "s3://b/k"
    file_name = "k"

    def __init__(self, data: bytes = b"models: {}", etag: str | None = '"1"', replaced: int = 0) -> None:
        self.data, self.etag, self.replaced = data, etag, replaced
        self.is_broken = False
        self.closed = 0

    def stat(self) -> Entry:
        """What it is."""
        if self.is_broken:
            raise Broken("no answer")
        return Entry("k", len(self.data), self.etag, 7.0)

    @contextmanager
    def read(self, begin: int, end: int | None, of: Entry | None = None) -> Iterator[FakeReading]:
        """Read."""
        if self.is_broken:
            raise Broken("no answer")
        yield FakeReading(self)

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def place_of(source: FakeSource) -> ObjectPlace:
    """A place over a fake."""
    opened: Source = source  # type: ignore[assignment]
    return ObjectPlace(lambda: opened, source.shown)


def test_an_object_that_is_replaced_while_it_is_read_is_read_again() -> None:
    """Never a mixture; one that is replaced all the time is said."""
    assert place_of(FakeSource(replaced=2)).read().data == b"models: {}"
    with pytest.raises(DocumentUnreadable, match="replaced all the time"):
        place_of(FakeSource(replaced=99)).read()


def test_an_object_without_an_etag_is_told_by_size_and_time() -> None:
    """Better than nothing."""
    assert place_of(FakeSource(etag=None)).look() == "10:7.0"
    assert place_of(FakeSource()).look() == '"1"'


def test_an_origin_that_does_not_answer_is_said_and_its_sources_are_closed() -> None:
    """Each question opens one and closes it."""
    source = FakeSource()
    place = place_of(source)
    source.is_broken = True

    for ask in (place.look, place.read):
        with pytest.raises(DocumentUnreadable, match="s3://b/k cannot be read: no answer"):
            ask()

    assert source.closed == 3
    assert not place.can_write


def test_an_object_of_a_real_store_is_swapped_by_its_etag() -> None:
    """S3, as moto speaks it: who was too late is refused."""
    pytest.importorskip("obstore")
    with s3_server() as server:
        bucket = server.bucket()
        bucket.put("models.yaml", b"one")
        stores = ObjectStores(environment=server.environment)
        target = parse_target(f"s3://{bucket.name}/models.yaml")
        place = ObjectPlace(lambda: stores.open(target), target.url)
        first = place.read()
        assert (first.data, place.look(), place.can_write) == (b"one", first.tag, True)

        second = place.write(b"two", first.tag)

        assert place.read() == document_place.Found(b"two", second)
        with pytest.raises(DesiredStateMoved):
            place.write(b"three", first.tag)
        assert place.read().data == b"two"


def test_a_file_that_is_not_there_is_made_by_one_writer(tmp_path: Path) -> None:
    """Whoever found none writes the first; who is too late, or found one that has gone, is told so."""
    place = FilePlace(tmp_path / "models.yaml")
    with pytest.raises(DocumentMissing):
        place.read()

    tag = place.write(b"one", ABSENT)

    assert place.read() == Found(b"one", tag)
    with pytest.raises(DesiredStateMoved):
        place.write(b"two", ABSENT)
    (tmp_path / "models.yaml").unlink()
    with pytest.raises(DesiredStateMoved):
        place.write(b"two", tag)
    assert os.listdir(tmp_path) == []


def test_an_object_that_is_not_there_is_made_by_one_writer() -> None:
    """By a create that the store refuses where there is one."""
    pytest.importorskip("obstore")
    with s3_server() as server:
        stores = ObjectStores(environment=server.environment)
        target = parse_target(f"s3://{server.bucket().name}/models.yaml")
        place = ObjectPlace(lambda: stores.open(target), target.url)
        with pytest.raises(DocumentMissing):
            place.read()

        tag = place.write(b"one", ABSENT)

        assert place.read() == Found(b"one", tag)
        with pytest.raises(DesiredStateMoved):
            place.write(b"two", ABSENT)
        assert place.read().data == b"one"
