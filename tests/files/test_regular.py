"""Tests for files that are not what they were: none is waited for, none is read without end, and each is named."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve.api.tls import read_pem_files
from marserve.archive.contents.manifest import read_manifest
from marserve.desired_state.document_place import FilePlace
from marserve.desired_state.history import History
from marserve.errors import BadArchive, BadSettings
from marserve.files.regular import NotRegular, TooLarge, open_regular, read_regular
from marserve.memory.learned_memory import LearnedMemory
from marserve.rollout.records import Records

pytestmark = pytest.mark.timeout(20)


def put_pipe(path: Path) -> None:
    """A named pipe without a writer: opening it waits."""
    os.mkfifo(path)


def put_zeros(path: Path) -> None:
    """A link to a device that has no end."""
    path.symlink_to("/dev/zero")


def put_folder(path: Path) -> None:
    """A folder where a file should be."""
    path.mkdir()


ODD = [put_pipe, put_zeros, put_folder]


@pytest.mark.parametrize("put", ODD)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """And its descriptor is closed."""
    put(tmp_path / "f")
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises((NotRegular, IsADirectoryError)):
        read_regular(tmp_path / "f", 10)

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_to_a_regular_file_passes_and_the_bound_is_kept(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap."""
    (tmp_path / "data").write_bytes(b"x" * 10)
    (tmp_path / "f").symlink_to("data")

    assert read_regular(tmp_path / "f", 10) == b"x" * 10
    with pytest.raises(TooLarge, match="more than 9 bytes"):
        read_regular(tmp_path / "f", 9)
    with open_regular(tmp_path / "f") as file:
        assert os.get_blocking(file.fileno()) is False
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")


@pytest.mark.parametrize("put", ODD)
def test_state_files_that_are_none_are_left_out_with_a_warning(
    tmp_path: Path, put: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts, and says which."""
    for name in ("00000001.json", "learned.json", "r.json"):
        put(tmp_path / name)

    with caplog.at_level(logging.WARNING):
        assert History(tmp_path).entries == []
        LearnedMemory(tmp_path / "learned.json").read()
        assert Records(tmp_path).read() == {}

    for name in ("00000001.json", "learned.json", "r.json"):
        assert name in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"number": "1", "at": 0, "by": "x", "what": "", "digest": "", "document": "models: {}"}',
        '{"number": 1, "at": 1e999, "by": "x", "what": "", "digest": "", "document": "models: {}"}',
        '{"number": 1, "at": NaN, "by": "x", "what": "", "digest": "", "document": "models: {}"}',
        '{"number": 1, "at": 1e300, "by": "x", "what": "", "digest": "", "document": "models: {}"}',
        '{"number": -1, "at": 0, "by": "x", "what": "", "digest": "", "document": "models: {}"}',
        '{"number": 1, "at": 0, "by": ["x"], "what": "", "digest": "", "document": "models: {}"}',
        "[]",
        "",
        "\0" * 100,
    ],
)
def test_a_history_that_makes_no_sense_is_left_out_with_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong types, numbers that cannot be, and what nests without end."""
    (tmp_path / "00000001.json").write_text(text)
    (tmp_path / "record.json").write_text(text)

    with caplog.at_level(logging.WARNING):
        assert History(tmp_path).entries == []
        assert Records(tmp_path).read() == {}

    assert "00000001.json of the history of desired states is not used" in caplog.text
    assert "record.json, cannot be read and is left out" in caplog.text


@pytest.mark.parametrize(
    "entries",
    [
        "[" * 200_000,
        '{"format": 1, "models": [{"model": "m", "version": "1", "weightBytes": 1e999, "firstBytes": 1, "moreBytes": 1,'
        '"peakBytes": 1, "loadSeconds": 1}]}',
        '{"format": 1, "models": [{"model": "m", "version": "1", "weightBytes": 1, "firstBytes": Infinity}]}',
        '{"format": 1, "models": [[], 1, null, {"model": "m"}]}',
        "\0",
    ],
)
def test_a_memory_file_that_makes_no_sense_is_learned_anew(tmp_path: Path, entries: str) -> None:
    """An infinite number ended the start."""
    (tmp_path / "f").write_text(entries)
    learned = LearnedMemory(tmp_path / "f")

    learned.read()

    assert learned.get(("m", "1", 1)) is None


@pytest.mark.parametrize("put", ODD[:2])
def test_documents_and_manifests_in_folders_are_refused_by_name(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """A registration must not hang in one, nor a reload of certificates."""
    (tmp_path / "m/MAR-INF").mkdir(parents=True)
    put(tmp_path / "m/MAR-INF/MANIFEST.json")
    put(tmp_path / "document")

    with pytest.raises(BadArchive, match="not a regular file"):
        read_manifest(tmp_path / "m")
    with pytest.raises(Exception, match="not a regular file"):
        FilePlace(tmp_path / "document").read()
    with pytest.raises(BadSettings, match="not a regular file"):
        read_pem_files(tmp_path / "document", tmp_path / "document")
