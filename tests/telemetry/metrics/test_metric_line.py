"""Lines of metrics: numbers as Java prints them, what is written, and what is understood."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marserve.messages import Metric
from marserve.telemetry.metrics.metric_line import (
    java_double,
    java_doubles,
    line_middle,
    line_start,
    marked_part,
    parse_line,
)

# The grammar that people's parsers have: contract 3.3.
WRITTEN = re.compile(
    r"([\w\s]+)\.([\w\s]+):([^|]+)\|#([^|]*)\|#hostname:([^,]+)(?:,requestID:([^|]+))?,timestamp:(\d+)"
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (1, "1.0"),
        (-2.5, "-2.5"),
        (0.001, "0.001"),
        (0.0001, "1.0E-4"),
        (0.00012, "1.2E-4"),
        (9999999.5, "9999999.5"),
        (10_000_000, "1.0E7"),
        (12_345_678, "1.2345678E7"),
        (-1.5e-300, "-1.5E-300"),
        (1e22, "1.0E22"),
        (float("nan"), "NaN"),
        (float("inf"), "Infinity"),
        (float("-inf"), "-Infinity"),
    ],
)
def test_numbers_are_written_as_java_writes_them(value: float, text: str) -> None:
    """Decimal from 0.001 to 10,000,000, scientific elsewhere."""
    assert java_double(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_no_digit_of_a_number_is_lost(value: float) -> None:
    """What is read back is what was written."""
    text = java_double(value)

    assert float(text) == value
    assert re.fullmatch(r"-?\d+\.\d+(E-?\d+)?", text)


@given(st.lists(st.floats() | st.integers(-(10**9), 10**9)))
@example([1.0, float("nan")])
@example([float("nan"), 1.0])
@example([1.0, 2])
def test_many_numbers_are_written_as_each_alone(values: list[float]) -> None:
    """Most are of one size, and quickly done."""
    assert java_doubles(values) == [java_double(value) for value in values]


def test_a_line_has_torchserves_form() -> None:
    """Name, unit, value, dimensions, host."""
    middle = line_middle(("ModelName", "Level", "Hostname"), ("noop", "Model"), "box")

    assert (
        line_start("HandlerTime", "ms") + java_double(82.93) + middle
        == "HandlerTime.ms:82.93|#ModelName:noop,Level:Model|#hostname:box"
    )


@given(st.text(max_size=30))
def test_no_dimension_breaks_a_line(value: str) -> None:
    """Whatever a handler names a dimension after, there is one line, and its parts are where they belong."""
    line = line_start("M", "Count") + "1.0" + line_middle(("D", "Host"), (value,), "box") + ",timestamp:7"

    found = WRITTEN.fullmatch(line)
    assert found
    assert (found[5], found[7]) == ("box", "7")


@pytest.mark.parametrize(
    ("text", "metric"),
    [
        (
            "HandlerTime.Milliseconds:82.93|#ModelName:noop,Level:Model|#type:GAUGE|#hostname:myhost,1717105307,6a0f",
            Metric("HandlerTime", 82.93, "Milliseconds", "gauge", [("ModelName", "noop"), ("Level", "Model")], "6a0f"),
        ),
        (
            "CPUUtilization.Percent:1e1|#Level:Host|#hostname:h,1",
            Metric("CPUUtilization", 10.0, "Percent", "", [("Level", "Host")], ""),
        ),
        ("a b.c d:-1|#odd,a:b:c,|#hostname:h,1,i,j", Metric("a b", -1.0, "c d", "", [], "i,j")),
        ("A.B:1,5|#|#hostname:h,1", None),
        ("A.B:x|#L:H|#hostname:h,1", None),
        ("A.B:1|#L:H", None),
        ("A:1|#L:H|#hostname:h,1", None),
        ("", None),
    ],
)
def test_lines_are_understood_as_torchserve_understands_them(text: str, metric: Metric | None) -> None:
    """Dimensions that are no pairs are left out; what is no such line is none."""
    assert parse_line(text) == metric


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("[METRICS]A", "A"),
        ("INFO > [METRICS]A", "A"),
        ("INFO [METRICS]A", None),
        (" [METRICS]A", None),
        ("x", None),
        ("a long line that speaks of [METRICS]", None),
    ],
)
def test_metrics_are_told_from_other_lines_by_their_beginning(text: str, rest: str | None) -> None:
    """The mark stands first, or behind TorchServe's `INFO > `."""
    assert marked_part(text) == rest


@pytest.mark.parametrize(
    "text",
    [" " * 8192, "a" * 8192, "a." * 4096, "a.b:1|#" + "," * 8192, "a.b:1|#a|#hostname:h,1," + " " * 8192 + "\x00"],
)
def test_a_line_that_says_no_metric_costs_no_more_than_its_length(text: str) -> None:
    """Lines are read on the event loop: nothing that a handler prints may keep everybody else waiting."""
    began = time.thread_time()

    for _ in range(10):
        parse_line(text)

    assert time.thread_time() - began < 1.0
