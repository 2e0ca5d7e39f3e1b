"""What was applied: bounded, complete or not at all, and right after a kill at any point."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from marserve.desired_state.document import DesiredState, read
from marserve.desired_state.history import History


def state(number: int) -> DesiredState:
    """A document of its own."""
    return read(f"models: {{m: {{versions: {{v: {{url: m.mar, workers: {number}}}}}}}}}".encode())


def add(history: History, number: int) -> None:
    """Apply a document."""
    history.add(state(number), at=float(number), by="apply", what=f"number {number}")


def test_entries_are_there_after_a_restart(tmp_path: Path) -> None:
    """With what undoing each goes back to."""
    history = History(tmp_path)
    for number in (1, 2, 3):
        add(history, number)
    history.add(state(1), at=4.0, by="undo", what="back", before=0)

    again = History(tmp_path)

    assert again.entries == history.entries
    assert [(entry.number, entry.before) for entry in again.entries] == [(1, 0), (2, 1), (3, 2), (4, 0)]
    assert again.newest is not None
    assert again.newest.state() == state(1)


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    """The oldest go, in memory and on disk; numbers go on."""
    history = History(tmp_path, kept=3)
    for number in range(1, 8):
        add(history, number)

    assert [entry.number for entry in history.entries] == [5, 6, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005.json", "00000006.json", "00000007.json"]
    assert history.find(4) is None


def test_one_that_did_not_come_into_force_is_taken_back(tmp_path: Path) -> None:
    """As if it had never been."""
    history = History(tmp_path)
    add(history, 1)
    add(history, 2)
    assert history.newest is not None

    history.take_back(history.newest)

    assert [entry.number for entry in History(tmp_path).entries] == [entry.number for entry in history.entries] == [1]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"number": 2}', "null"])
def test_a_damaged_file_is_left_alone_and_said(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """What lies before it is found all the same; other files are nobody's business."""
    history = History(tmp_path)
    add(history, 1)
    (tmp_path / "00000002.json").write_text(content)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".00000003.json.abc.part").write_text("half")

    with caplog.at_level(logging.WARNING):
        again = History(tmp_path)

    assert [entry.number for entry in again.entries] == [1]
    assert "00000002.json of the history of desired states is not used" in caplog.text
    assert not (tmp_path / ".00000003.json.abc.part").exists()
    assert (tmp_path / "notes.txt").exists()


def test_a_document_that_somebody_has_written_into_is_not_used(tmp_path: Path) -> None:
    """Its text must still be a document."""
    history = History(tmp_path)
    add(history, 1)
    path = tmp_path / "00000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "document": "modles: {}"}))

    assert History(tmp_path).newest is None


def test_without_a_folder_it_is_kept_in_memory() -> None:
    """For as long as the server lives."""
    history = History(None)
    add(history, 1)
    add(history, 2)

    assert history.newest is not None
    assert history.newest.describe(is_current=True)["undoGoesTo"] == 1
