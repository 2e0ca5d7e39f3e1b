"""Snapshots as files: names that follow each other, folders with other things in them, and what is left out."""

from __future__ import annotations

import errno
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from marserve.settings import Settings, load_settings
from marserve.settings.load import read_properties
from marserve.settings.snapshot_files import (
    FolderSnapshots,
    effective_properties,
    snapshot_folder,
    snapshot_name,
    write_properties,
)

NOON = datetime(2026, 1, 31, 12, 0, 0, 7_999)


def test_a_name_is_local_time_to_the_millisecond_and_what_was_the_matter() -> None:
    """TorchServe's form."""
    assert snapshot_name("startup", NOON) == "20260131120000007-startup.cfg"


@pytest.mark.parametrize("after", ["20260131120000007-startup.cfg", "20260131120000006-shutdown.cfg", None, "odd"])
def test_a_name_comes_after_the_one_before_it(after: str | None) -> None:
    """Two in one millisecond are two names."""
    expected = "008" if after and "007-" in after else "007"

    assert snapshot_name("snapshot", NOON, after) == f"20260131120000{expected}-snapshot.cfg"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("20260131125959999-snapshot.cfg", "20260131130000000-snapshot.cfg"),
        ("99999999999999999-snapshot.cfg", "20260131120001007-snapshot.cfg"),
    ],
    ids=["clock set back", "no time at all"],
)
def test_a_clock_that_was_set_back_makes_no_older_name(after: str, expected: str) -> None:
    """Once a year local time does so by itself."""
    assert snapshot_name("snapshot", NOON, after) == expected


def test_the_newest_is_found_by_the_time_in_its_name(tmp_path: Path) -> None:
    """Not by the file's; files of other names are told apart, folders and hidden files are nothing."""
    for name in ("20260131120000000-startup.cfg", "20251231120000000-shutdown.cfg", "notes.txt", ".hidden", "x.cfg"):
        (tmp_path / name).write_text(name)
    (tmp_path / "20990101000000000-startup.cfg").mkdir()
    os.utime(tmp_path / "20251231120000000-shutdown.cfg", (4e9, 4e9))

    snapshots = FolderSnapshots(tmp_path)

    assert snapshots.newest() == ("20260131120000000-startup.cfg", b"20260131120000000-startup.cfg")
    assert snapshots.strays() == ["notes.txt", "x.cfg"]


def test_a_folder_that_is_not_there_has_no_snapshots(tmp_path: Path) -> None:
    """And looking does not make it."""
    snapshots = FolderSnapshots(tmp_path / "config")

    assert (snapshots.newest(), snapshots.strays()) == (None, [])
    assert not (tmp_path / "config").exists()


def test_a_snapshot_is_written_whole_for_its_owner_alone(tmp_path: Path) -> None:
    """Nothing else stays in the folder, and nothing is overwritten."""
    snapshots = FolderSnapshots(tmp_path / "logs" / "config")
    name = "20260131120000000-startup.cfg"

    snapshots.save(name, b"a=1\n")
    with pytest.raises(FileExistsError):
        snapshots.save(name, b"a=2\n")

    assert snapshots.newest() == (name, b"a=1\n")
    assert [path.name for path in snapshots.folder.iterdir()] == [name]
    assert (snapshots.folder / name).stat().st_mode & 0o777 == 0o600


def test_a_snapshot_that_cannot_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk shows when the file is written out."""

    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", is_full)

    with pytest.raises(OSError, match="No space left"):
        FolderSnapshots(tmp_path).save("20260131120000000-startup.cfg", b"a=1\n")

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_deleted_a_minute_later(tmp_path: Path) -> None:
    """Not at once: another machine's lock is not seen on every file system. Earlier versions named it otherwise."""
    left = [tmp_path / name for name in (f".{'a' * 32}.tmp", f".{'a' * 16}.part")]
    for path in left:
        path.touch()
    FolderSnapshots(tmp_path).save("20260131120000001-startup.cfg", b"")
    at_once = [path.exists() for path in left]
    for path in left:
        os.utime(path, (time.time() - 120,) * 2)

    FolderSnapshots(tmp_path).save("20260131120000002-startup.cfg", b"")

    assert (at_once, [path.exists() for path in left]) == ([True, True], [False, False])


def test_no_more_are_kept_than_was_asked_for(tmp_path: Path) -> None:
    """The oldest snapshots go; what is none stays."""
    (tmp_path / "00000000000000000.cfg").write_text("")
    snapshots = FolderSnapshots(tmp_path, keep=2)

    for second in range(4):
        snapshots.save(f"2026013112000{second}000-snapshot.cfg", b"")

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "00000000000000000.cfg",
        "20260131120002000-snapshot.cfg",
        "20260131120003000-snapshot.cfg",
    ]


def test_snapshots_lie_beside_the_logs(tmp_path: Path) -> None:
    """In `logs` where no folder was named."""
    assert snapshot_folder(None, tmp_path) == tmp_path / "logs" / "config"
    assert snapshot_folder(tmp_path / "there", tmp_path) == tmp_path / "there" / "config"


# ------------------------------------------------------------------------------------------------ lines


def load(here: Path, lines: str, environment: dict[str, str] | None = None, **flags: str) -> Settings:
    """Settings of `torchserve --ts-config it.properties`."""
    (here / "store").mkdir(exist_ok=True)
    (here / "it.properties").write_text(f"disable_token_authorization=true\n{lines}")
    given = {"ts_config": "it.properties", "model_store": "store", **flags}
    return load_settings("torchserve", given, environment or {}, here)


def test_the_lines_are_what_was_given_wherever_it_was(tmp_path: Path) -> None:
    """As it was written; defaults are not given, and what was found is marked as such."""
    settings = load(tmp_path, "job_queue_size=7\nload_models=all\n", config_snapshots="true")

    lines = effective_properties(settings, {"number_of_gpu": "0", "job_queue_size": "9"}, "1.2.3")

    assert lines == {
        "version": "1.2.3",
        "tsConfigFile": str(tmp_path / "it.properties"),
        "model_store": "store",
        "load_models": "all",
        "disable_token_authorization": "true",
        "job_queue_size": "7",
        "config_snapshots": "true",
        "number_of_gpu": "0",
        "marserveFacts": "number_of_gpu",
    }


def test_no_secret_gets_into_a_snapshot(tmp_path: Path) -> None:
    """Passwords, what a variable holds, and addresses of archives that carry a key."""
    (tmp_path / "store.p12").write_bytes(b"")
    settings = load(
        tmp_path,
        "keystore=store.p12\nkeystore_pass=planted-1\nsystem_metrics_cmd=measure.py --key $$KEY$$\n"
        "load_models=https://example.org/m.mar?X-Amz-Signature=planted-3\n",
        {"KEY": "planted-2", "MARSERVE_TOKEN": "planted-4"},
    )

    text = write_properties(effective_properties(settings, {}, "1"))

    assert settings.keystore_pass == "planted-1"
    assert b"planted" not in text
    assert b"system_metrics_cmd=measure.py --key $$KEY$$" in text


@pytest.mark.parametrize(("query", "is_kept"), [("", True), ("?X-Amz-Signature=planted", False)])
def test_the_address_of_a_document_is_kept_where_it_holds_no_key(tmp_path: Path, query: str, is_kept: bool) -> None:
    """A presigned one is for who starts the server to say again."""
    settings = load(tmp_path, f"desired_state=https://example.org/models.yaml{query}\n")

    lines = effective_properties(settings, {}, "1")

    assert ("desired_state" in lines) is is_kept


def test_what_platforms_say_by_variables_is_left_to_them(tmp_path: Path) -> None:
    """A port or a temporary folder of yesterday would be wrong tomorrow."""
    settings = load(
        tmp_path,
        "allowed_urls=gs://mine/.*\n",
        {
            "TEMP": str(tmp_path),
            "AIP_HTTP_PORT": "9999",
            "AIP_STORAGE_URI": "gs://vertex/7",
            "LOG_LOCATION": str(tmp_path),
            "MARSERVE_LOG_LEVEL": "debug",
        },
    )

    lines = effective_properties(settings, {}, "1")

    given = {"temporary_folder", "inference_address", "load_models", "log_location", "log_level"}
    assert not given & lines.keys()
    assert len(settings.allowed_urls) == 2
    assert lines["allowed_urls"] == "gs://mine/.*"


def test_lines_are_read_as_they_were_written() -> None:
    """Whatever stands in them."""
    lines = {"a b": 'x=1:2 # "ä" \\ end ', "model_snapshot": '{"name": "ü", "models": {}}'}

    assert {name: text for name, text, _ in read_properties(write_properties(lines), "x")} == lines
