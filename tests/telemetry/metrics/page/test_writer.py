"""Our writer of the page against prometheus_client's: the same text in both formats, and its parsers take it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.utils import floatToGoString

from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.page.families import Family, Labels, Row
from marserve.telemetry.metrics.page.writer import EOF, NUMBERS_AT_ONCE, FamilyText, number, write
from support.metric_pages import assert_equal, two_digits

# The parsers split lines where Python does, not where the format says, so no other line ends than \n are drawn.
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], include_characters="\n"), max_size=8)
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)


@st.composite
def histograms(draw: st.DrawFn) -> Histogram:
    """A histogram with values, and perhaps with examples."""
    bounds = sorted(draw(st.sets(st.floats(0, 1e9, allow_subnormal=False), min_size=1, max_size=6)))
    histogram = Histogram(bounds)
    if draw(st.booleans()):
        histogram.keep_examples()
    for value, name in draw(st.lists(st.tuples(st.floats(0, 2e9), WORDS), max_size=6)):
        histogram.observe(value)
        histogram.exemplify(value, name * draw(st.sampled_from([1, 40])), draw(st.sampled_from(["", "c0ffee" * 5])))
    return histogram


@st.composite
def drawn_families(draw: st.DrawFn) -> list[Family]:
    """Families of all types, whose names do not clash."""
    families = []
    for index, name in enumerate(draw(st.lists(NAMES, unique=True, max_size=5))):
        kind = draw(st.sampled_from(["counter", "gauge", "histogram"]))
        ending = "_total" if kind == "counter" and draw(st.booleans()) else ""
        labels = tuple(draw(st.lists(NAMES.filter(lambda name: name != "le"), unique=True, max_size=3)))
        values: st.SearchStrategy[Any] = st.integers(0, 10**9) | st.floats(0, 1e18)
        if kind == "gauge":
            values = st.floats() | st.integers(-(10**12), 10**12)
        elif kind == "histogram":
            values = histograms()
        keys = draw(st.lists(st.tuples(*[WORDS for _ in labels]), unique=True, max_size=3))
        rows: list[Row] = [(key, draw(values)) for key in keys]
        text = draw(WORDS.filter(lambda text: text.strip() != "" and text == text.strip()))
        families.append(Family(f"f{index}_{name}{ending}", kind, text, labels, lambda rows=rows: rows))  # type: ignore[misc]
    return families


@given(drawn_families())
def test_whatever_the_families_are_both_writers_say_the_same(families: list[Family]) -> None:
    """In 0.0.4 and in OpenMetrics, exemplars and all; and the library's parsers take both."""
    assert_equal(families)


@given(st.floats() | st.integers(-(10**18), 10**18))
def test_a_number_is_written_as_the_library_writes_it(value: float) -> None:
    """Exponents, infinities and what is no number included."""
    assert number(value) == two_digits(floatToGoString(value))


def family(kind: str, *rows: Row, name: str = "things", labels: Labels = ("a",)) -> Family:
    """A family with these rows."""
    return Family(name, kind, "Things.", labels, lambda: rows)


def test_a_counter_without_total_is_a_counter_in_text_and_unknown_in_openmetrics() -> None:
    """TorchServe's names stay as recorded in both formats."""
    recorded = family("counter", (("x",), 3), name="Requests2XX")

    assert write([recorded]) == '# HELP Requests2XX Things.\n# TYPE Requests2XX counter\nRequests2XX{a="x"} 3.0\n'
    assert write([recorded], is_open=True) == (
        '# HELP Requests2XX Things.\n# TYPE Requests2XX unknown\nRequests2XX{a="x"} 3.0\n# EOF\n'
    )


def test_a_counter_with_total_loses_the_ending_in_openmetrics_headers_only() -> None:
    """Its samples are named the same in both formats, so that dashboards see one series."""
    counter = family("counter", (("x",), 3), name="things_total")

    assert "# TYPE things_total counter\nthings_total{" in write([counter])
    assert "# TYPE things counter\nthings_total{" in write([counter], is_open=True)


def test_a_histogram_of_negative_values_has_no_sum_in_openmetrics() -> None:
    """OpenMetrics forbids it, and its parser refuses the whole page; text keeps it, as recorded."""
    histogram = Histogram((0.5, 1.0))
    histogram.observe(-7.0)
    negative = family("histogram", (("x",), histogram))

    opened = write([negative], is_open=True)

    assert 'things_sum{a="x"} -7.0\n' in write([negative])
    assert "_sum" not in opened
    assert "_count" not in opened
    assert len(list(parse_open(opened))) == 1


def test_an_exemplar_has_no_more_than_128_characters() -> None:
    """What does not fit is left out, and nothing is cut: half an id would be another one."""
    histogram = Histogram((1.0, 2.0, 3.0))
    histogram.keep_examples()
    for value, request, trace in ((0.5, "r" * 118, ""), (1.5, "r" * 119, ""), (2.5, "r" * 79, "t" * 32), (9, "r", "t")):
        histogram.observe(value)
        histogram.exemplify(value, request, trace)

    first, second, third, last = write([family("histogram", (("x",), histogram))], is_open=True).splitlines()[2:6]

    assert first.endswith(f'# {{request_id="{"r" * 118}"}} 0.5')
    assert second.endswith(" 2.0")
    assert third.endswith(f'# {{trace_id="{"t" * 32}"}} 2.5')
    assert last.endswith('# {request_id="r",trace_id="t"} 9.0')


@pytest.mark.parametrize("request_id", ['"', "a\\b", "{a", "a}", "a\nb"])
def test_an_id_that_would_be_escaped_makes_no_exemplar(request_id: str) -> None:
    """The library's parser refuses the whole page for some of them, and clients choose ids."""
    histogram = Histogram((1.0,))
    histogram.keep_examples()
    histogram.observe(0.5)
    histogram.exemplify(0.5, request_id)

    page = write([family("histogram", (("x",), histogram))], is_open=True)

    assert " # " not in page
    assert len(list(parse_open(page))) == 1


def test_text_shows_no_exemplar() -> None:
    """The format 0.0.4 has none."""
    histogram = Histogram((1.0,))
    histogram.keep_examples()
    histogram.observe(0.5)
    histogram.exemplify(0.5, "abc")

    assert "abc" not in write([family("histogram", (("x",), histogram))])


def test_what_has_not_changed_is_the_same_text_object() -> None:
    """A page of many models that were not asked costs a comparison."""
    values = [1.0, 2.0]
    text = FamilyText(Family("g", "gauge", "G.", ("a",), lambda: [(("x",), values[0]), (("y",), values[1])]))
    histogram = Histogram((1.0,))
    bars = FamilyText(family("histogram", (("x",), histogram)))

    first, second = list(text.pieces())[1], list(text.pieces())[1]
    values[1] = 3.0
    third = list(text.pieces())[1]
    empty, again = list(bars.pieces()), list(bars.pieces())
    histogram.observe(0.5)

    assert first is second
    assert third == 'g{a="x"} 1.0\ng{a="y"} 3.0\n'
    assert empty == again
    assert list(bars.pieces()) != empty


def test_a_family_that_shrinks_forgets_what_has_gone() -> None:
    """A thousand versions that came and went leave nothing behind."""
    keys = [f"v{index}" for index in range(5000)]
    histogram = Histogram((1.0,))
    texts = [
        FamilyText(Family("g", "gauge", "G.", ("a",), lambda: [((key,), 1.0) for key in keys])),
        FamilyText(Family("h", "histogram", "H.", ("a",), lambda: [((key,), histogram) for key in keys])),
    ]
    for text in texts:
        assert "v4999" in "".join(text.pieces())
    keys[:] = ["left"]
    for text in texts:
        list(text.pieces())

    pages = ["".join(text.pieces()) for text in texts]

    assert all("v4999" not in page and "left" in page for page in pages)
    assert all(len(text._chunks) + len(text._blocks) + len(text._prefixes) <= 2 for text in texts)


def test_a_new_histogram_under_old_labels_is_not_shown_with_the_old_text() -> None:
    """A version that was replaced by one of its name, with as many requests."""
    old, new = Histogram((1.0,)), Histogram((1.0,))
    old.observe(0.5)
    new.observe(5.0)
    rows: list[Row] = [(("x",), old)]
    text = FamilyText(Family("h", "histogram", "H.", ("a",), lambda: rows))
    list(text.pieces())

    rows[0] = (("x",), new)

    assert 'h_sum{a="x"} 5.0' in "".join(text.pieces())


def test_a_piece_is_small() -> None:
    """However large a family is, the event loop may run between its pieces."""
    many = FamilyText(Family("g", "gauge", "G.", ("a",), lambda: [((str(index),), index) for index in range(2000)]))

    pieces = list(many.pieces())

    assert max(piece.count("\n") for piece in pieces) <= NUMBERS_AT_ONCE
    assert sum(piece.count("\n") for piece in pieces) == 2002


@pytest.mark.parametrize("is_open", [False, True])
def test_only_named_samples_are_written(is_open: bool) -> None:
    """`name[]`: exactly these names; a family without a sample left is not mentioned."""
    histogram = Histogram((1.0,))
    bars = FamilyText(family("histogram", (("x",), histogram)))

    assert list(bars.pieces(frozenset({"things"}), is_open=is_open)) == []
    wanted = "".join(bars.pieces(frozenset({"things_count"}), is_open=is_open))
    assert wanted.splitlines()[1:] == ["# TYPE things histogram", 'things_count{a="x"} 0.0']
    assert EOF not in wanted
