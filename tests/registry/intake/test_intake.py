"""Tests for taking archives in."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

from marserve.archive.reading import unpacked as unpacked_module
from marserve.archive.reading.reader import Limits
from marserve.archive.reading.unpacked import UnpackedArchives
from marserve.errors import (
    ArchiveNotFound,
    BadArchive,
    DigestMismatch,
    Draining,
    MarserveError,
    OutOfMemory,
    UnsafeArchive,
)
from marserve.files import digests
from marserve.registry.intake import intake as intake_module
from marserve.registry.intake.intake import Intake
from marserve.store.fetching.fetcher import Fetched
from marserve.store.sources.local import LocalStore
from support.echo_archives import manifest, write_mar


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An empty model store."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def intake(store: Path, tmp_path: Path) -> Intake:
    """An intake of the store; its scratch folder is not there yet."""
    return Intake(LocalStore(store), tmp_path / "scratch" / "models", Limits())


def test_an_archive_gets_a_private_folder_of_its_own(intake: Intake, store: Path) -> None:
    """Its name is 32 hex digits, and two takings share nothing."""
    write_mar(store / "m.mar", config="batchSize: 3\n")

    first, second = intake.take_in("m.mar"), intake.take_in("m.mar")

    assert first.folder != second.folder
    assert len(first.folder.name) == 32
    assert (first.folder / "echo.py").is_file()
    assert (first.manifest.model_name, first.config.options.batch_size) == ("m", 3)


def test_a_discarded_folder_is_gone_and_the_empty_scratch_folder_with_it(intake: Intake, store: Path) -> None:
    """Nothing is left behind by a server that ended; discarding twice is no error."""
    write_mar(store / "m.mar")
    unpacked = intake.take_in("m.mar")

    unpacked.discard()
    unpacked.discard()
    intake.clear()

    assert not intake.scratch.exists()


def test_a_scratch_folder_that_is_in_use_stays(intake: Intake, store: Path) -> None:
    """Another server's archives may be in it."""
    write_mar(store / "m.mar")
    intake.take_in("m.mar")

    intake.clear()

    assert intake.scratch.is_dir()


def test_a_fetched_folder_is_served_in_place_too(intake: Intake, store: Path) -> None:
    """A hub's cache gives folders."""
    folder = store / "plain"
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"modelName": "plain"}}')
    (folder / "echo.py").touch()
    fetched = Fetched(folder, "plain", None, None, contextlib.ExitStack(), address="hf://org/plain@0123")

    assert intake.take_in("hf://org/plain", fetched).folder == folder.resolve()


def test_a_folder_of_the_store_is_served_in_place_and_never_deleted(intake: Intake, store: Path) -> None:
    """The "no-archive" format."""
    folder = store / "plain"
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"modelName": "plain"}}')
    (folder / "echo.py").touch()

    unpacked = intake.take_in("plain")
    unpacked.discard()

    assert unpacked.folder == folder.resolve()
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("name", "body", "error"),
    [
        ("gone.mar", None, ArchiveNotFound),
        ("noise.mar", b"no archive at all", BadArchive),
        ("bad.mar", "manifest", BadArchive),
        ("pickle.mar", "pickle", UnsafeArchive),
    ],
)
def test_an_archive_that_cannot_be_taken_in_leaves_nothing(
    intake: Intake, store: Path, name: str, body: bytes | str | None, error: type[MarserveError]
) -> None:
    """Not found, no archive, a broken manifest, a pickle that calls."""
    if body == "manifest":
        write_mar(store / name, {}, **{"MAR-INF/MANIFEST__json": b"{"})
    elif body == "pickle":
        write_mar(store / name, manifest(), weights__pt=b"cos\nsystem\n(S'true'\ntR.")
    elif isinstance(body, bytes):
        (store / name).write_bytes(body)

    with pytest.raises(error):
        intake.take_in(name)

    assert not intake.scratch.exists() or not list(intake.scratch.iterdir())


@pytest.mark.parametrize("trust", ["name", "digest"])
def test_what_the_operator_trusts_is_taken_in_and_told(store: Path, tmp_path: Path, trust: str) -> None:
    """By the archive's name in the store, or by its digest; what was found goes to the version's warnings."""
    path = write_mar(store / "m.mar", manifest(), weights__pt=b"cos\nsystem\n(S'true'\ntR.")
    word = "m.mar" if trust == "name" else hashlib.sha256(path.read_bytes()).hexdigest()

    unpacked = Intake(LocalStore(store), tmp_path / "scratch", Limits(), [word]).take_in("m.mar")

    assert "weights.pt" in unpacked.warnings[0]
    assert unpacked.is_trusted


def test_an_archive_is_hashed_once(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though an address names it, the operator trusts it by that, its folder is noted with it, and nodes ask for it."""
    path = write_mar(store / "m.mar", manifest(), weights__pt=b"cos\nsystem\n(S'true'\ntR.")
    word = hashlib.sha256(path.read_bytes()).hexdigest()
    hashed: list[Any] = []
    archives, real = UnpackedArchives(), hashlib.sha256

    def count(*given: Any) -> Any:
        hashed.append(given)
        return real(*given)

    archives.digests._now = lambda: time.time() + 60.0
    monkeypatch.setattr(digests.hashlib, "sha256", count)
    intake = Intake(LocalStore(store), tmp_path / "scratch", Limits(), trusted=(word,), archives=archives)

    unpacked = intake.take_in(f"m.mar#sha256={word}")

    assert "weights.pt" in unpacked.warnings[0]
    assert unpacked.origin is not None
    assert unpacked.origin.sha256 == word
    assert len(hashed) == 1


def test_an_archive_that_is_replaced_after_its_digest_was_compared_is_refused(
    intake: Intake, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was unpacked is what its digest says, or nothing is left of it."""
    path = write_mar(store / "m.mar", manifest())
    word = hashlib.sha256(path.read_bytes()).hexdigest()
    real = intake_module.compare_digest

    def replace_after(*given: Any) -> None:
        real(*given)
        write_mar(store / "m.mar", manifest(), other__txt=b"other")

    monkeypatch.setattr(intake_module, "compare_digest", replace_after)

    with pytest.raises(DigestMismatch):
        intake.take_in(f"m.mar#sha256={word}")

    assert list(intake.scratch.iterdir()) == []


def test_what_was_fetched_and_is_replaced_before_it_is_unpacked_is_refused(
    intake: Intake, store: Path, tmp_path: Path
) -> None:
    """Its digest is that of what was fetched, and was compared with the address's."""
    path = write_mar(store / "m.mar", manifest())
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    write_mar(store / "m.mar", manifest(), other__txt=b"other")
    fetched = Fetched(path, "m.mar", sha256, path, contextlib.ExitStack())

    with pytest.raises(DigestMismatch):
        intake.take_in(f"http://h/m.mar#sha256={sha256}", fetched)

    assert list(intake.scratch.iterdir()) == []


@pytest.mark.parametrize("touches", [1, 5])
def test_an_archive_that_is_touched_while_it_is_unpacked_is_unpacked_again(
    intake: Intake, store: Path, monkeypatch: pytest.MonkeyPatch, touches: int
) -> None:
    """Another server that links the file changes its time; one that never rests is refused."""
    path = write_mar(store / "m.mar", manifest())
    word = hashlib.sha256(path.read_bytes()).hexdigest()
    real, calls = unpacked_module.unpack, []

    def touch(*given: Any) -> None:
        real(*given)
        calls.append(given)
        if len(calls) <= touches:
            path.chmod(0o600 + len(calls) % 2 * 0o44)

    monkeypatch.setattr(unpacked_module, "unpack", touch)

    if touches < 5:
        assert intake.take_in(f"m.mar#sha256={word}").folder.is_dir()
        assert len(calls) == 2
    else:
        with pytest.raises(BadArchive, match=r"m\.mar was changed each time it was unpacked"):
            intake.take_in(f"m.mar#sha256={word}")
        assert list(intake.scratch.iterdir()) == []


def test_what_was_fetched_and_is_damaged_is_named_as_it_was_asked_for(intake: Intake, tmp_path: Path) -> None:
    """Not as the cache calls it, which is a digest."""
    blob = tmp_path / f"{'0' * 64}.9.1"
    blob.write_bytes(b"PK\x03\x04 cut")
    fetched = Fetched(blob, "m.mar", None, None, contextlib.ExitStack())

    with pytest.raises(BadArchive, match=r"m\.mar") as refused:
        intake.take_in("http://h/m.mar", fetched)

    assert "0000" not in refused.value.message


def test_trust_in_one_archive_is_no_trust_in_another(store: Path, tmp_path: Path) -> None:
    """Nor in a file of another content."""
    write_mar(store / "m.mar", manifest(), weights__pt=b"cos\nsystem\n(S'true'\ntR.")

    with pytest.raises(UnsafeArchive):
        Intake(LocalStore(store), tmp_path / "scratch", Limits(), ["other.mar", "0" * 64]).take_in("m.mar")


@pytest.mark.parametrize("url", ["https://h/m.mar?sig=planted", "https://h/a/../m.mar?sig=planted"])
def test_an_address_is_refused_without_its_key(intake: Intake, url: str) -> None:
    """What is said of a registration may be logged, and shown to whoever asks how the start went."""
    with pytest.raises(ArchiveNotFound) as refused:
        intake.take_in(url)

    assert "https://h/" in refused.value.message
    assert "planted" not in refused.value.message


@pytest.mark.parametrize(
    ("number", "error", "sentence"),
    [
        (errno.ENOSPC, OutOfMemory, "No space is left to save model: m.mar"),
        (errno.EIO, MarserveError, "Failed to save model: m.mar"),
    ],
)
def test_a_disk_that_fails_is_told_without_a_path(
    intake: Intake, store: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[MarserveError], sentence: str
) -> None:
    """A full disk is told apart, for it may pass."""
    write_mar(store / "m.mar")

    def fail(*_: object) -> None:
        raise OSError(number, "on purpose", "/secret/place")

    monkeypatch.setattr(unpacked_module, "unpack", fail)

    with pytest.raises(error) as raised:
        intake.take_in("m.mar")

    assert type(raised.value) is error
    assert raised.value.message == sentence


def test_what_is_checked_when_the_server_stops_is_given_up_and_leaves_nothing(
    intake: Intake, store: Path, tmp_path: Path
) -> None:
    """The check of an archive can take many seconds; a stop does not wait for it."""
    write_mar(store / "m.mar", manifest(), data__bin=b"N." * 10_000)

    intake.stop_taking_in()

    with pytest.raises(Draining):
        intake.take_in("m.mar")
    assert list((tmp_path / "scratch" / "models").iterdir()) == []
