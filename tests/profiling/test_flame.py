"""Pictures of stacks: as wide as their time, and hostile names are text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from marserve.answers.profiles import ProfileStack
from marserve.profiling.flame import draw, python_stacks

HOSTILE = "<script>alert(1)</script>\x00\"'&"


def test_a_box_is_as_wide_as_what_it_stands_for() -> None:
    """Calls stand above their callers, beside each other."""
    drawn = draw([ProfileStack(["a", "b"], 30), ProfileStack(["a"], 10), ProfileStack(["c"], 60)], "operators", "ms")

    boxes = re.findall(r"<title>(\w+): ([\d.]+) ms, ([\d.]+%)</title><rect x=\"([\d.]+)\" y=\"([\d.]+)\"", drawn)
    found = {name: (value, share, float(x), float(y)) for name, value, share, x, y in boxes}

    assert {name: each[:2] for name, each in found.items()} == {
        "all": ("100", "100.0%"),
        "a": ("40", "40.0%"),
        "b": ("30", "30.0%"),
        "c": ("60", "60.0%"),
    }
    assert found["c"][2] == 480
    assert found["b"][3] < found["a"][3] < found["all"][3]


def test_hostile_names_are_text_and_the_picture_is_xml() -> None:
    """Without a script, whatever a model calls its functions."""
    drawn = draw([ProfileStack([HOSTILE, "b" * 500], 1)], HOSTILE, "ms")

    tree = ElementTree.fromstring(drawn)
    assert not [each for each in tree.iter() if each.tag.endswith("script")]
    assert "<script" not in drawn


def test_no_stacks_make_a_picture_of_nothing() -> None:
    """Rather than a division by zero."""
    assert "<rect" not in draw([], "operators", "ms")


def test_the_lines_of_py_spy_become_stacks() -> None:
    """Others are left out."""
    read = python_stacks("main (a.py:1);f (b c.py:2) 30\nmain (a.py:1) 3\n\nno number\n;\nx 99999999999999\n")

    assert [(each.names, each.value) for each in read] == [
        (["main (a.py:1)", "f (b c.py:2)"], 30),
        (["main (a.py:1)"], 3),
    ]


def test_values_without_a_share_are_left_out_of_the_picture() -> None:
    """As a server of another make may send them."""
    drawn = draw([ProfileStack(["a"], float("inf")), ProfileStack(["b"], float("nan"))], "operators", "ms")

    assert "<rect" not in drawn
