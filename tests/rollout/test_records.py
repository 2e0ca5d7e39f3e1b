"""Records of roll-outs on disk: whole or not at all, one file a model, bounded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from marserve.rollout.records import KEPT_ENDED, Records, file_name


def test_what_was_written_is_read_again_by_another_server(tmp_path: Path) -> None:
    """Of each model, whatever its name."""
    records = Records(tmp_path / "state" / "rollouts")
    names = ["m", "M", "a/b", "../x", "ä", "a_b", "x" * 300]
    for name in names:
        records.write(name, [{"id": name}])

    assert Records(tmp_path / "state" / "rollouts").read() == {name: [{"id": name}] for name in names}
    assert len({file_name(name) for name in names}) == len(names)
    assert all(file.parent == tmp_path / "state" / "rollouts" for file in tmp_path.rglob("*.json"))


def test_only_the_latest_are_kept(tmp_path: Path) -> None:
    """The present one, and so many before it."""
    records = Records(tmp_path)
    records.write("m", [{"id": str(number)} for number in range(50)])

    kept = records.read()["m"]

    assert len(kept) == KEPT_ENDED + 1
    assert kept[-1] == {"id": "49"}


def test_a_write_that_fails_leaves_the_file_before_and_nothing_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is an error, not half a record."""
    records = Records(tmp_path)
    records.write("m", [{"id": "1"}])

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        records.write("m", [{"id": "2"}])

    assert records.read() == {"m": [{"id": "1"}]}
    assert [file.name for file in tmp_path.iterdir()] == [file_name("m")]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"format": 2, "model": "m", "rollouts": []}',
        b'{"format": 1, "model": 3, "rollouts": []}',
    ],
)
def test_a_file_that_is_no_record_is_left_out_and_said(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are read."""
    records = Records(tmp_path)
    records.write("good", [{"id": "1"}])
    (tmp_path / "bad.json").write_bytes(content)

    with caplog.at_level(logging.ERROR, "marserve.rollout"):
        found = records.read()

    assert found == {"good": [{"id": "1"}]}
    assert "bad.json" in caplog.text


def test_what_a_crash_left_is_deleted_at_the_next_start(tmp_path: Path) -> None:
    """It is hidden, and no record."""
    (tmp_path / f".{'a' * 16}.part").write_bytes(b"half")

    assert Records(tmp_path).read() == {}
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_no_record(tmp_path: Path) -> None:
    """It is made when there is something to keep."""
    assert Records(tmp_path / "none").read() == {}
    assert not (tmp_path / "none").exists()


def test_a_record_can_be_read_by_people(tmp_path: Path) -> None:
    """It is JSON over several lines."""
    Records(tmp_path).write("m", [{"id": "1"}])

    text = (tmp_path / file_name("m")).read_text()

    assert json.loads(text)["rollouts"] == [{"id": "1"}]
    assert text.count("\n") > 3
