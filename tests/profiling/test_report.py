"""The report as a page: all that was measured, without a script, and hostile names as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from marserve.profiling.report import write_report
from support.profiles import HOSTILE, a_hostile_profile, a_profile


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        """Keep it, too."""
        self.text += data + " "


def test_the_page_says_what_was_measured() -> None:
    """Parts, operators with their shapes, both pictures, remarks."""
    page = write_report([("", a_profile())])
    read = Tags(page)

    assert "50 of the 50 asked for requests in 50 batches, 1.0 s, W-9000-digits_1.0" in read.text
    assert re.search(r"operators of torch\s+500\.0\s+50\.0%", read.text)
    assert "[4, 4] [4, 4] (500 calls, 300.0 ms)" in read.text
    assert "aten::matmul" in read.text
    assert "handle (handler.py:3)" in read.text
    assert "Recorded in 25 of 50 batches." in read.text
    assert "The servers beside each other" not in read.text


def test_several_servers_stand_beside_each_other_in_one_report() -> None:
    """And each by itself below."""
    read = Tags(write_report([("http://a:8081", a_profile()), ("http://b:8081", a_profile(requests=7))]))

    assert "The servers beside each other" in read.text
    assert read.text.count("http://b:8081") == 2


def test_what_is_missing_has_its_reason() -> None:
    """Without torch, and without py-spy."""
    without = a_profile(operators=[], noOperators="it uses no torch", pythonStacks=None, noPython="py-spy may not")
    read = Tags(write_report([("", without)]))

    assert "None were recorded: it uses no torch." in read.text
    assert "No samples: py-spy may not." in read.text


def test_hostile_names_are_text_on_a_page_without_scripts() -> None:
    """Wherever they stand."""
    page = write_report([(HOSTILE, a_hostile_profile()), ("", a_hostile_profile())])

    assert "script" not in Tags(page).tags
    assert "<script" not in page
    assert "default-src 'none'" in page
