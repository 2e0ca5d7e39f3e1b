"""Tests for uploaded archives: whole and checked in the store, or nothing of them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.reading.reader import Limits
from marserve.errors import (
    ArchiveInUse,
    ArchiveNotAsSaid,
    BadArchive,
    BadName,
    BodyTooLarge,
    Draining,
    OtherArchiveThere,
    OutOfMemory,
    StoreNotWritable,
    TooManyUploads,
    TrustedByName,
    UnsafeArchive,
)
from marserve.registry.intake import uploads as uploads_module
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.uploads import MOST_AT_ONCE, Uploaded, Uploads, Wish, check_archive_name
from marserve.store.fetching.fetched_archives import FetchedArchives
from marserve.store.sources.local import LocalStore
from support.echo_archives import write_mar
from support.pickles import canary

pytestmark = pytest.mark.anyio


class Place:
    """A model store, and what takes uploads into it."""

    def __init__(self, root: Path, *, most_bytes: int = 1 << 30, trusted: tuple[str, ...] = ()) -> None:
        self.store, self.scratch = root / "store", root / "scratch"
        self.store.mkdir()
        self.used: set[str] = set()
        self.fetched = FetchedArchives(None)
        self.intake = Intake(LocalStore(self.store), self.scratch, Limits(), trusted, fetched_archives=self.fetched)
        self.uploads = Uploads(self.intake, self.used.__contains__, most_bytes)

    async def take(self, name: str, data: bytes, piece: int = 100, **wish: Any) -> Uploaded:
        """Upload it in pieces."""
        return await self.uploads.take(name, pieces_of(data, piece), Wish(**wish))

    @property
    def left(self) -> list[str]:
        """What is in the store and in the scratch folder."""
        folders = [self.store, *([self.scratch] if self.scratch.exists() else [])]
        return sorted(path.name for folder in folders for path in folder.iterdir())


async def pieces_of(data: bytes, piece: int = 100) -> AsyncIterator[bytes]:
    """The data in pieces, with an empty one before the last."""
    for at in range(0, len(data), piece):
        if at + piece >= len(data):
            yield b""
        yield data[at : at + piece]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """An empty store."""
    return Place(tmp_path)


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    """An archive."""
    return write_mar(tmp_path / "made.mar").read_bytes()


@pytest.fixture
def other(tmp_path: Path) -> bytes:
    """Another archive."""
    return write_mar(tmp_path / "made.mar", config="batchSize: 3\n").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".mar",
        ".hidden.mar",
        "..",
        "../m.mar",
        "/m.mar",
        "a/m.mar",
        "./m.mar",
        "a\\m.mar",
        "C:m.mar",
        "a..b.mar",
        "m\n.mar",
        "m\x00.mar",
        "\u202emar.exe.mar",
        "a\u2215..\uff0fm.mar",
        "m\ufffd.mar",
        f"{'m' * 300}.mar",
        f"{'m' * 197}.mar",
        "m",
        "m.txt",
        "m.mar.part",
    ],
)
def test_names_that_lead_elsewhere_or_are_not_found_again_are_refused(name: str) -> None:
    """What is a path, hidden, odd, or has not an archive's ending."""
    with pytest.raises(BadName):
        check_archive_name(name)


@pytest.mark.parametrize("name", ["m.mar", "M.MAR", "m-2.0_b.tar.gz", "mödel 1.tgz", "m#1?.mar"])
def test_names_of_archives_are_taken(name: str) -> None:
    """In either case, with any printable character."""
    check_archive_name(name)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", BadArchive),
        (b"no archive", BadArchive),
        (b"\x1f\x8bno tar", BadArchive),
    ],
)
async def test_what_is_no_archive_leaves_nothing(place: Place, content: bytes, error: type[Exception]) -> None:
    """Empty, text, and a beginning alone."""
    with pytest.raises(error, match=r"m\.mar"):
        await place.take("m.mar", content)

    assert place.left == []


async def test_a_cut_archive_leaves_nothing(place: Place, data: bytes) -> None:
    """Its directory at the end is missing."""
    with pytest.raises(BadArchive):
        await place.take("m.mar", data[:-30])

    assert place.left == []


async def test_an_archive_that_registrations_would_refuse_leaves_nothing(place: Place, tmp_path: Path) -> None:
    """Its pickles are judged before it is put in place."""
    evil = write_mar(tmp_path / "evil.mar", weights__pkl=canary(str(tmp_path / "canary"))).read_bytes()

    with pytest.raises(UnsafeArchive):
        await place.take("m.mar", evil)

    assert place.left == []


async def test_a_name_that_settings_trust_cannot_be_taken(tmp_path: Path, data: bytes) -> None:
    """Its pickles would be opened unchecked; a trusted digest is what an upload may have."""
    place = Place(tmp_path, trusted=("m.mar", hashlib.sha256(data).hexdigest()))

    with pytest.raises(TrustedByName):
        await place.take("m.mar", data)
    taken = await place.take("n.mar", data)

    assert (taken.is_new, place.left) == (True, ["n.mar"])


@pytest.mark.parametrize("is_said", [True, False])
async def test_what_is_too_large_leaves_nothing(tmp_path: Path, data: bytes, is_said: bool) -> None:
    """Refused unread if its length is said, else when the limit is passed."""
    place, read = Place(tmp_path, most_bytes=len(data) - 1), []

    async def chunks() -> AsyncIterator[bytes]:
        async for piece in pieces_of(data):
            read.append(len(piece))
            yield piece

    with pytest.raises(BodyTooLarge, match="max_upload_size"):
        await place.uploads.take("m.mar", chunks(), Wish(length=len(data) if is_said else None))

    assert bool(read) is not is_said
    assert place.left == []


async def test_a_wrong_digest_leaves_nothing(place: Place, data: bytes) -> None:
    """Both digests are named."""
    wanted = "0" * 64

    with pytest.raises(ArchiveNotAsSaid) as caught:
        await place.take("m.mar", data, sha256=wanted)

    assert wanted in caught.value.message
    assert hashlib.sha256(data).hexdigest() in caught.value.message
    assert place.left == []


async def test_a_client_that_goes_leaves_nothing(place: Place, data: bytes) -> None:
    """Whatever its surface raises."""

    async def chunks() -> AsyncIterator[bytes]:
        yield data[:50]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await place.uploads.take("m.mar", chunks(), Wish())

    assert place.left == []


async def test_a_server_that_stops_leaves_nothing(place: Place, data: bytes) -> None:
    """The upload ends at once, though its client sends nothing; later ones are refused."""
    is_waiting = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield data[:50]
        is_waiting.set()
        await asyncio.Event().wait()

    taking = asyncio.create_task(place.uploads.take("m.mar", chunks(), Wish()))
    await is_waiting.wait()
    place.uploads.stop()

    with pytest.raises(Draining):
        await taking
    with pytest.raises(Draining):
        await place.take("m.mar", data)
    assert place.left == []


async def test_a_server_that_stops_between_two_pieces_leaves_nothing(place: Place, data: bytes) -> None:
    """Though nothing is waited for then."""

    async def chunks() -> AsyncIterator[bytes]:
        place.uploads.stop()
        yield data

    with pytest.raises(Draining):
        await place.uploads.take("m.mar", chunks(), Wish())
    assert place.left == []


async def test_a_server_that_stops_during_a_check_does_not_wait_for_its_end(place: Place, data: bytes) -> None:
    """The hidden file is gone while a large archive is still unpacked."""
    is_checked, may_end = threading.Event(), threading.Event()

    def judge(*_: object) -> None:
        is_checked.set()
        may_end.wait(10)

    place.intake.judge = judge  # type: ignore[method-assign]
    taking = asyncio.create_task(place.take("m.mar", data))
    await asyncio.to_thread(is_checked.wait, 10)

    place.uploads.stop()
    await asyncio.gather(*place.uploads._leaving)
    left = place.left
    may_end.set()

    with pytest.raises(Draining):
        await taking
    assert left == place.left == []


async def test_a_cancelled_upload_leaves_nothing(place: Place, data: bytes) -> None:
    """Also while a thread writes."""
    is_waiting = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield data[:50]
        is_waiting.set()
        await asyncio.Event().wait()

    taking = asyncio.create_task(place.uploads.take("m.mar", chunks(), Wish()))
    await is_waiting.wait()
    taking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await taking
    assert place.left == []


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, OutOfMemory), (errno.EDQUOT, OutOfMemory), (errno.EROFS, StoreNotWritable)],
)
async def test_a_disk_that_takes_no_more_leaves_nothing(
    place: Place, data: bytes, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """In the middle of the file."""
    true_write, written = os.write, []

    def write(descriptor: int, piece: Any) -> int:
        if written:
            raise OSError(number, os.strerror(number))
        written.append(1)
        return true_write(descriptor, piece[:10])

    monkeypatch.setattr(uploads_module.os, "write", write)

    with pytest.raises(error):
        await place.take("m.mar", data)

    assert place.left == []


async def test_what_has_no_room_is_refused_unread(place: Place) -> None:
    """By its length and the free space."""
    with pytest.raises(BodyTooLarge):
        await place.take("m.mar", b"", length=1 << 60)
    place.uploads = Uploads(place.intake, place.used.__contains__, 1 << 62)
    with pytest.raises(OutOfMemory, match="No space is left"):
        await place.take("m.mar", b"", length=1 << 60)

    assert place.left == []


@pytest.mark.parametrize("has_store", [True, False])
async def test_a_store_that_cannot_be_written_to_is_said_in_a_sentence(
    place: Place, data: bytes, monkeypatch: pytest.MonkeyPatch, has_store: bool
) -> None:
    """Read-only, or none at all."""
    if has_store:

        def refuse(*_: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(uploads_module, "Part", refuse)
    else:
        place.intake.store.root = None

    with pytest.raises(StoreNotWritable, match=r"takes no uploads: .* store"):
        await place.take("m.mar", data)


async def test_an_archive_is_in_the_store_whole_and_stays_there(place: Place, data: bytes) -> None:
    """With its digest and length; it is not one that the server fetched, though a fetched one had its name."""
    sha256 = hashlib.sha256(data).hexdigest()
    place.fetched.note(place.store / "m.mar", sha256, "https://origin/m.mar")

    taken = await place.take("m.mar", data, length=len(data), sha256=sha256)

    assert taken == Uploaded("m.mar", sha256, len(data), is_new=True)
    assert (place.store / "m.mar").read_bytes() == data
    assert place.left == ["m.mar"]
    assert not place.fetched.delete(place.store / "m.mar")
    assert place.intake.take_in("m.mar").manifest.model_name == "m"


async def test_a_large_archive_is_written_in_pieces_and_said_once(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its bytes are those that came; the log names it when it is new."""
    caplog.set_level("INFO", logger="marserve.registry")
    data = write_mar(tmp_path / "made.mar", weights__bin=random.Random(1).randbytes(3_500_000)).read_bytes()

    await place.take("m.mar", data, 70_000, is_dry_run=True)
    await place.take("m.mar", data, 70_000)
    await place.take("m.mar", data, 70_000)

    assert (place.store / "m.mar").read_bytes() == data
    [said] = [record.getMessage() for record in caplog.records if "uploaded" in record.getMessage()]
    assert said == f"m.mar was uploaded: {len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}"


async def test_a_file_appears_in_the_store_by_one_step(place: Place, data: bytes) -> None:
    """While it comes and while it is checked, only a hidden file is there."""
    seen: list[list[str]] = []

    async def chunks() -> AsyncIterator[bytes]:
        async for piece in pieces_of(data):
            seen.append([name for name in place.left if not name.startswith(".")])
            yield piece

    judge = place.intake.judge

    def watch(*arguments: Any) -> None:
        seen.append(place.intake.store.names())
        judge(*arguments)

    place.intake.judge = watch  # type: ignore[method-assign]
    await place.uploads.take("m.mar", chunks(), Wish())

    assert set(map(tuple, seen)) == {()}
    assert place.left == ["m.mar"]


@pytest.mark.parametrize("is_said", [True, False])
async def test_the_same_content_again_is_no_error(place: Place, data: bytes, is_said: bool) -> None:
    """A digest that is said is enough: nothing is read. The file stays as it is."""
    sha256 = hashlib.sha256(data).hexdigest()
    await place.take("m.mar", data)
    before = (place.store / "m.mar").stat()

    again = await place.take("m.mar", b"" if is_said else data, sha256=sha256 if is_said else None)

    assert again == Uploaded("m.mar", sha256, len(data), is_new=False)
    assert os.path.samestat((place.store / "m.mar").stat(), before)
    assert place.left == ["m.mar"]


@pytest.mark.parametrize("wish", ["nothing", "length", "digest"])
async def test_other_content_under_the_same_name_is_refused(place: Place, data: bytes, other: bytes, wish: str) -> None:
    """Whatever the client says of it; the file stays."""
    await place.take("m.mar", data)
    said = {
        "nothing": {},
        "length": {"length": len(other)},
        "digest": {"sha256": hashlib.sha256(other).hexdigest()},
    }[wish]

    with pytest.raises(OtherArchiveThere, match=r"m\.mar with other content"):
        await place.take("m.mar", other, **said)

    assert (place.store / "m.mar").read_bytes() == data
    assert place.left == ["m.mar"]


async def test_a_folder_of_the_name_stays(place: Place, data: bytes) -> None:
    """It is no file that could be replaced."""
    (place.store / "m.mar").mkdir()

    with pytest.raises(OtherArchiveThere):
        await place.take("m.mar", data)
    with pytest.raises(ArchiveInUse):
        await place.take("m.mar", data, replaces=True)

    assert (place.store / "m.mar").is_dir()


@pytest.mark.parametrize("kind", ["pipe", "link"])
async def test_what_is_no_file_stays(place: Place, data: bytes, kind: str) -> None:
    """A pipe is not opened, and of a link that leads nowhere nothing is read; neither is the server's failure."""
    at = place.store / "m.mar"
    if kind == "pipe":
        os.mkfifo(at)
    else:
        at.symlink_to(place.store / "nowhere")

    with pytest.raises(OtherArchiveThere):
        await place.take("m.mar", data, sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(ArchiveInUse):
        await place.take("m.mar", data, replaces=True)

    assert place.left == ["m.mar"]


async def test_a_file_is_replaced_if_that_is_wanted_and_no_version_uses_it(
    place: Place, data: bytes, other: bytes
) -> None:
    """One that is used stays."""
    await place.take("m.mar", data)
    place.used.add("m.mar")
    with pytest.raises(ArchiveInUse):
        await place.take("m.mar", other, replaces=True)
    kept = (place.store / "m.mar").read_bytes()
    place.used.clear()

    taken = await place.take("m.mar", other, replaces=True, sha256=hashlib.sha256(other).hexdigest())

    assert (kept, taken.is_new) == (data, True)
    assert (place.store / "m.mar").read_bytes() == other
    assert place.left == ["m.mar"]


async def test_a_dry_run_keeps_nothing_and_says_the_same(place: Place, data: bytes, other: bytes) -> None:
    """What would be refused is refused."""
    first = await place.take("m.mar", data, is_dry_run=True)
    left = place.left
    await place.take("m.mar", data)
    same = await place.take("m.mar", data, is_dry_run=True)
    replaced = await place.take("m.mar", other, is_dry_run=True, replaces=True)

    assert (first.is_new, left) == (True, [])
    assert (same.is_new, replaced.is_new) == (False, True)
    assert (place.store / "m.mar").read_bytes() == data
    with pytest.raises(OtherArchiveThere):
        await place.take("m.mar", other, is_dry_run=True)


async def test_of_two_at_once_one_wins_and_the_other_gets_its_answer(place: Place, data: bytes, other: bytes) -> None:
    """Equal content is no conflict."""
    first, same = await asyncio.gather(place.take("m.mar", data), place.take("m.mar", data))
    ends = await asyncio.gather(place.take("n.mar", data), place.take("n.mar", other), return_exceptions=True)

    assert sorted([first.is_new, same.is_new]) == [False, True]
    [won] = [end for end in ends if isinstance(end, Uploaded)]
    [lost] = [end for end in ends if isinstance(end, OtherArchiveThere)]
    assert lost.name == "n.mar"
    assert hashlib.sha256((place.store / "n.mar").read_bytes()).hexdigest() == won.sha256
    assert place.left == ["m.mar", "n.mar"]


async def test_so_many_are_taken_at_once_and_no_more(place: Place, data: bytes) -> None:
    """One more is asked to come back; when one has ended, the next is taken."""
    go_on, waiting = asyncio.Event(), asyncio.Semaphore(0)

    async def chunks() -> AsyncIterator[bytes]:
        waiting.release()
        await go_on.wait()
        yield data

    taking = [asyncio.create_task(place.uploads.take(f"{n}.mar", chunks(), Wish())) for n in range(MOST_AT_ONCE)]
    for _ in taking:
        await waiting.acquire()
    with pytest.raises(TooManyUploads, match="4 archives are being uploaded"):
        await place.take("m.mar", data)
    go_on.set()
    await asyncio.gather(*taking)

    assert (await place.take("m.mar", data)).is_new


async def test_what_a_killed_server_left_is_deleted(place: Place, data: bytes) -> None:
    """At the start and with the next upload; never a file of another name."""
    (place.store / ".0123456789abcdef.part").write_bytes(data)
    (place.store / ".keep").write_bytes(data)
    await place.uploads.sweep()
    swept = place.left
    (place.store / ".0123456789abcdef.part").write_bytes(data)

    await place.take("m.mar", data)

    assert swept == [".keep"]
    assert place.left == [".keep", "m.mar"]


async def test_writing_never_holds_the_loop_up(place: Place, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the store is touched on it."""
    loop_thread, touched = threading.get_ident(), set()

    def note(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            touched.add(threading.get_ident())
            return call(*arguments)

        return noted

    for method in ("begin", "write", "check", "place", "discard"):
        monkeypatch.setattr(uploads_module._Upload, method, note(getattr(uploads_module._Upload, method)))

    await place.take("m.mar", data)

    assert touched
    assert loop_thread not in touched
