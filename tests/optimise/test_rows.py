"""What a row of a search's report says of its build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marserve.cli.local import optimise as command
from marserve.optimise.comparison import Verdict
from marserve.optimise.optimise import Report, Row, _measured, describe_report
from marserve.optimise.page import write_page

WHY = "m 1.0: there is a OrderedDict in what it takes or gives"


def report(row: Row) -> Report:
    """One of this row alone."""
    return Report("m", "1.0", "memory", 1, 4, 4, [row], 100, [])


def test_a_build_that_failed_after_it_was_judged_has_not_passed_and_cannot_win() -> None:
    """Its samples could not be written, say: the page, the table and the document show why."""
    row = Row("bf16", verdict=Verdict(()), why_not=WHY, size=50)
    document: dict[str, Any] = describe_report(report(row))

    assert not row.has_passed
    assert _measured([row]) == {}
    assert (document["builds"][0]["passed"], document["builds"][0]["whyNot"]) == (False, WHY)
    assert command._row(row, [], report(row))[-1] == WHY
    assert f'<td class="bad">{WHY}</td>' in write_page(document, 0.03)


def test_a_build_that_was_judged_and_not_refused_is_equal() -> None:
    """Or the best."""
    row = Row("bf16", verdict=Verdict(()), size=50)
    winner = report(row)
    winner.winner, winner.archive = "bf16", Path("m-optimised.mar")

    assert row.has_passed
    assert list(_measured([row])) == ["bf16"]
    assert command._row(row, [], report(row))[-1] == "equal"
    assert command._row(row, [], winner)[-1] == "the best"
