"""Remarks: sentences with what code asks of them."""

from __future__ import annotations

import json

from marserve.remarks import Place, Remark


def test_a_remark_is_its_text_wherever_text_goes() -> None:
    """With its source in brackets at the end, where it has one."""
    remark = Remark("batch stands twice", source="config.properties, line 4")

    assert remark == "batch stands twice (config.properties, line 4)"
    assert json.dumps([remark, Remark("alone")]) == '["batch stands twice (config.properties, line 4)", "alone"]'


def test_a_remark_goes_to_another_source_as_it_was() -> None:
    """The sentence and the facts stay."""
    moved = Remark("n is 0", source="--n", key="n", line=3, is_wrong=True).said_at("--set n")

    assert (moved, moved.key, moved.line, moved.is_wrong) == ("n is 0 (--set n)", "n", 3, True)


def test_a_place_knows_its_line() -> None:
    """A flag or a variable has none."""
    place = Place.in_file("config.properties", 14)

    assert (place, place.line) == ("config.properties, line 14", 14)
    assert (Place("--models").line, Place("x.properties, line 3").line) == (0, 0)
