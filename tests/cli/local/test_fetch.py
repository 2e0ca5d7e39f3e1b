"""`marserve fetch`, run against real origins: a folder of files, S3's stand-in, and what goes wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from support.command_line import marserve
from support.object_stores import S3Server


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read the settings of the folder they run in."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A file that could be an archive: nothing of it is read here."""
    path = tmp_path / "m.mar"
    path.write_bytes(b"archive" * 1000)
    return path


def test_what_is_typed_is_fetched_from_a_store_without_further_permission(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a folder that is made, with its digest told; a second run finds it there and asks nobody."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    bucket = s3.bucket()
    bucket.put("team/m.mar", b"archive" * 1000)
    address = f"s3://{bucket.name}/team/m.mar"
    folder = tmp_path / "models" / "new"

    first = marserve("fetch", "--json", "--to", folder, address)
    bucket.delete("team/m.mar")
    second = marserve("fetch", "--to", folder, address)

    digest = hashlib.sha256(b"archive" * 1000).hexdigest()
    assert first.status == 0
    assert first.document["archives"] == [{"address": address, "name": "m.mar", "outcome": "fetched", "sha256": digest}]
    assert [path.name for path in folder.iterdir()] == ["m.mar"]
    assert (second.status, second.out) == (0, "m.mar is there already\n")


def test_another_content_than_the_digest_says_is_refused_and_leaves_nothing(archive: Path, tmp_path: Path) -> None:
    """The status is 1, so that an init container fails and is tried again."""
    ran = marserve("fetch", "--to", tmp_path / "models", f"{archive.as_uri()}#sha256={'0' * 64}")

    assert ran.status == 1
    assert f"not {'0' * 64}" in ran.err
    assert list((tmp_path / "models").iterdir()) == []


def test_a_digest_is_compared_with_what_is_there_already(archive: Path, tmp_path: Path) -> None:
    """A restart of the pod must not go on with another file of that name."""
    models = tmp_path / "models"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert marserve("fetch", "--to", models, f"{archive.as_uri()}#sha256={digest}").status == 0

    again = marserve("fetch", "--to", models, f"{archive.as_uri()}#sha256={digest}")
    (models / "m.mar").write_bytes(b"another")
    other = marserve("fetch", "--to", models, f"{archive.as_uri()}#sha256={digest}")

    assert (again.status, again.out) == (0, "m.mar is there already\n")
    assert other.status == 1
    assert "m.mar in the model store has the SHA-256 digest" in other.err


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("m.mar", "only http, https, file"),
        ("https://user:secret@host.example/m.mar", "user information does not belong into it"),
        ("file:///none/m.mar", "Failed to download archive from: file:///none/m.mar"),
        ("hf://team/model@main", "is kept in the hub's own cache"),
        ("http://169.254.169.254/m.mar", "which is never fetched"),
    ],
)
def test_what_cannot_be_fetched_is_refused_with_a_sentence(address: str, sentence: str, tmp_path: Path) -> None:
    """No secret of the address is repeated."""
    ran = marserve("fetch", "--to", tmp_path / "models", address)

    assert ran.status == 1
    assert sentence in " ".join(ran.err.split())
    assert "secret" not in ran.err


def test_two_archives_of_one_name_are_refused_before_anything_is_fetched(archive: Path, tmp_path: Path) -> None:
    """The second would silently not be there."""
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "m.mar"
    other.write_bytes(b"other")

    ran = marserve("fetch", "--to", tmp_path / "models", archive.as_uri(), other.as_uri())

    assert ran.status == 1
    assert "would both be called m.mar" in ran.err
    assert not (tmp_path / "models").exists()


def test_a_folder_that_cannot_be_made_is_named(archive: Path) -> None:
    """Below a file there is no folder, whoever asks."""
    ran = marserve("fetch", "--to", archive / "below", archive.as_uri())

    assert ran.status == 1
    assert f"The folder {archive / 'below'} cannot be made" in " ".join(ran.err.split())
