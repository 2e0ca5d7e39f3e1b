"""What one check may do: counted over all files, ended by a word, with pauses for other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve.archive.pickles.check_budget import CheckBudget, CheckStopped, Overspent
from marserve.archive.pickles.pickle_check import check_folder
from marserve.errors import Draining, UnsafeArchive


def after(times: int) -> Callable[[], bool]:
    """Says yes when it was asked more often than that."""
    asked = iter(range(times))
    return lambda: next(asked, None) is None


def test_as_many_operations_as_there_are_can_be_spent_and_not_one_more() -> None:
    """In whatever portions."""
    budget = CheckBudget(1000)

    for portion in (1, 499, 500):
        budget.spend(portion)

    with pytest.raises(Overspent, match="more than 1000 operations together"):
        budget.spend()


def test_a_stop_is_noticed_within_some_thousand_operations() -> None:
    """The word comes from another thread, or is there from the beginning."""
    stop = threading.Event()
    budget = CheckBudget(is_stopped=stop.is_set)
    for _ in range(20_000):
        budget.spend()

    stop.set()

    with pytest.raises(CheckStopped):
        budget.spend(5000)


@pytest.mark.parametrize("trusted", [False, True])
def test_a_check_ends_when_the_server_stops_also_between_its_pickles(tmp_path: Path, trusted: bool) -> None:
    """It would go on for minutes; also where the operator trusts the archive, nothing more is looked into."""
    (tmp_path / "data").write_bytes(b"N." * 50_000)

    with pytest.raises(Draining):
        check_folder(tmp_path, trusted=trusted, is_stopped=after(3))


def test_operations_are_counted_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first two took is missing in the third. A trusted archive is looked into no further."""
    monkeypatch.setattr("marserve.archive.pickles.check_budget.MAX_OPERATIONS", 5000)
    for name in "abcd":
        (tmp_path / name).write_bytes(b"\x80\x02" + b"N0" * 1000 + b"N.")

    with pytest.raises(UnsafeArchive) as refused:
        check_folder(tmp_path)
    findings = check_folder(tmp_path, trusted=True)

    assert refused.value.member == "c"
    assert len(findings) == 1
    assert "'c'" in findings[0]
