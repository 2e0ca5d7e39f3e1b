"""The picture in the docs is what the real judge does; and the table of what it can see is what it sees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marserve.rollout.judge import Limits, budget_of, smallest_found
from support.rollout_timeline import STORIES, draw_svg, play

DOCS = Path(__file__).parents[2] / "docs"


def test_the_picture_is_drawn_from_the_judge() -> None:
    """`PYTHONPATH=tests python tests/support/draw_rollouts.py` draws it again."""
    assert (DOCS / "rollouts.svg").read_text("utf-8") == draw_svg()


def test_each_story_ends_as_it_must() -> None:
    """One is promoted after all its holds, the others go earlier the worse they are."""
    told = [play(*story) for story in STORIES]

    assert [story.state for story in told] == ["promoted", *3 * ["rolled back"]]
    assert told[0].ended_s >= 120
    assert [story.ended_s for story in told] == sorted((story.ended_s for story in told), reverse=True)


def test_the_table_of_what_is_found_is_true() -> None:
    """Each row of `docs/rollouts.md`: requests, and the smallest share that is found nine times of ten."""
    limits = Limits()
    budget = budget_of(limits, 4, compares=True)
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d.]+) % \| ([\d.]+) % \|$", (DOCS / "rollouts.md").read_text("utf-8"), re.MULTILINE
    )

    assert len(rows) >= 5
    for requests, errors, differing in rows:
        count = int(requests.replace(",", ""))
        for told, allowed in ((errors, limits.max_error_increase), (differing, limits.max_difference)):
            found = smallest_found(count, allowed, budget)
            assert found is not None
            assert float(told) == pytest.approx(100 * found, rel=0.03)
