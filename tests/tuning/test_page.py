"""The picture of a search."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from marserve.tuning.page import write_page
from marserve.tuning.search import Found, Row, Sample
from marserve.tuning.settings import Layout, Setting


def _row(size: int, foreseen: float, measured: float | None = None) -> Row:
    samples = [] if measured is None else [(measured, Sample(measured, 0.01))]
    return Row(Setting(Layout(1, "<b>1.0</b>"), size, 0.0), foreseen, measured, list(samples))


def test_each_setting_has_a_bar_and_each_measured_one_a_dot() -> None:
    """The best stands out, and so does what is now; those that keep no goal are left out."""
    rows = [_row(8, 300.0, 280.0), _row(4, 200.0, 210.0), _row(2, 100.0), _row(32, 0.0)]
    found = Found(rows, {}, _row(1, 50.0, 40.0), ["Time was up."])

    page = write_page("digits <1>", "p99=50ms", "Better.", found, "+batchSize: 8\n")

    assert page.count("<rect") == 4
    assert page.count("<circle") == 3
    assert re.search(r'class="best"[^>]*>&lt;b&gt;1\.0&lt;/b&gt;, 1 worker, batches of 8, 0 ms<', page)
    assert "batches of 1, 0 ms (now)" in page
    assert "+batchSize: 8" in page
    assert "Time was up." in page


def test_names_are_text_and_nothing_is_asked_for() -> None:
    """No script, no address; it parses."""
    page = write_page("<script>x</script>", "rate", "", Found([], {}), "")
    HTMLParser().feed(page)

    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "No setting keeps the goal." in page
