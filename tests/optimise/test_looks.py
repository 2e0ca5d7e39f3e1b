"""Which builds a search only looks at: those that are surely slower than one that passed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from marserve.optimise.candidates import Candidate, Goal
from marserve.optimise.comparison import Verdict
from marserve.optimise.optimise import Report, Row, Wish, _Search
from marserve.optimise.ratio import Ratio
from marserve.optimise.recording import Recording
from marserve.optimise.subject import Facts, Subject

CANDIDATE = Candidate("onnx", is_exact=True)
INPUTS = tuple(range(20))


class Timed:
    """In the place of an archive's process: its model takes so many seconds for a batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.recorded: list[int] = []
        self.timed: list[int] = []
        self.threads = 1

    def record(self, inputs: Sequence[object], folder: Path, batch_size: int, within_s: float) -> None:
        """Keep how many inputs it got."""
        assert folder.is_dir()
        self.recorded.append(len(inputs))

    def use_threads(self, threads: int, within_s: float) -> None:
        """Keep how many."""
        self.threads = threads

    def time(self, rows: int, seconds: float) -> float:
        """The same each time."""
        self.timed.append(rows)
        return self.seconds


def search_of(folder: Path, goal: Goal = "latency", passed: float | None = 5.0, *, is_by_name: bool = False) -> _Search:
    """A search whose build onnx-int8 passed, so many times as fast as the parent; None: it was refused."""
    row = Row("onnx-int8", verdict=Verdict(() if passed else ("unequal",)))
    if passed:
        row.ratios = {rows: Ratio(passed, passed - 0.1, passed + 0.1) for rows in (1, 8)}
    return _Search(
        start=cast(Any, None),
        parent=cast(Subject, Timed(1.0)),
        recorded=Recording([], "torch", "", []),
        facts=Facts("torch", "", "", 100, [], {}),
        wish=Wish(goal=goal),
        scratch=folder,
        calibrating=[],
        compared=cast(Any, INPUTS),
        size=8,
        share=2,
        report=Report("m", "1.0", goal, 8, 20, 0, [row, Row("onnx")], 100, []),
        is_by_name=is_by_name,
        until=math.inf,
    )


def look(search: _Search, subject: Timed) -> tuple[str, Row]:
    """Why it is not compared, and its row."""
    row = Row("onnx")
    return search._beaten(CANDIDATE, cast(Subject, subject), row, lambda step: None), row


@pytest.mark.parametrize(("goal", "rows"), [("latency", 1), ("throughput", 8)])
def test_one_that_is_surely_slower_than_one_that_passed_is_not_compared(tmp_path: Path, goal: Goal, rows: int) -> None:
    """After five pairs of what the goal asks for, with a worker's share of threads; the row has what was seen."""
    search, subject = search_of(tmp_path, goal), Timed(0.5)

    why, row = look(search, subject)

    assert why == "not compared: onnx-int8 is faster with certainty"
    assert row.ratios == {rows: Ratio(2.0, 2.0, 2.0)}
    assert subject.timed == [rows] * 5
    assert (subject.threads, cast(Timed, search.parent).threads) == (2, 2)
    assert list(tmp_path.iterdir()) == []


def test_one_that_may_be_as_fast_is_compared(tmp_path: Path) -> None:
    """Its span reaches the other's; nothing of the look is kept."""
    why, row = look(search_of(tmp_path), Timed(1 / 4.9))

    assert (why, row.ratios) == ("", {})


@pytest.mark.parametrize(
    "given",
    [{"goal": "memory"}, {"passed": None}, {"passed": 1.05}, {"is_by_name": True}],
    ids=["for memory", "nothing passed", "not surely faster than the parent", "named"],
)
def test_without_one_that_can_beat_it_nobody_looks(tmp_path: Path, given: dict[str, Any]) -> None:
    """Nor where the goal is memory, or the build was asked for by name."""
    subject = Timed(2.0)

    assert look(search_of(tmp_path, **given), subject)[0] == ""
    assert (subject.recorded, subject.timed) == ([], [])
