"""The page of a search."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from marserve.optimise.page import HEIGHT, LEAST_ERROR, WIDTH, points_of, write_page, write_picture


def build(
    name: str, *, passed: bool = True, error: float | None = 0.01, ratio: float = 2.0, **more: Any
) -> dict[str, Any]:
    """A build of a report."""
    return {
        "name": name,
        "passed": passed,
        "whyNot": None,
        "faults": [],
        "notes": [],
        "outputs": [] if error is None else [{"meanError": error}, {"meanError": error / 2}],
        "agreement": {"by": "top-1", "agreeing": 9, "inputs": 9, "shown": 0.98},
        "ratios": [
            {"rows": rows, "threads": 1, "middle": ratio, "low": ratio * 0.9, "high": ratio * 1.1} for rows in (1, 8)
        ],
        "seconds": 1.0,
        "bytes": 1_500_000,
        **more,
    }


def report(*builds: dict[str, Any], winner: str | None = None, goal: str = "latency") -> dict[str, Any]:
    """A report of a model."""
    return {
        "modelName": "m",
        "modelVersion": "1.0",
        "goal": goal,
        "batchSize": 8,
        "threads": 1,
        "calibrated": 16,
        "compared": 48,
        "seconds": 12.0,
        "winner": winner,
        "archive": winner and "m-optimised.mar",
        "notes": [],
        "builds": list(builds),
    }


class Tags(HTMLParser):
    """Collects the tags, and sees that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One opens."""
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One that is closed by itself."""
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        """One closes."""
        assert self.open.pop() == tag


def parsed(page: str) -> Tags:
    """The page's tags."""
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def test_each_build_is_a_row_and_each_measured_one_a_point() -> None:
    """With the words for what became of it."""
    page = write_page(
        report(
            build("onnx", ratio=3.0),
            build("bf16", passed=False, faults=["alone: scores has a mean error of 0.2"]),
            build("openvino", passed=False, error=None, ratios=[], whyNot="openvino is not installed", agreement=None),
            winner="onnx",
        ),
        0.03,
    )

    tags = parsed(page)
    assert tags.seen.count("tr") == 4
    assert tags.seen.count("circle") == 2
    assert "onnx is the best, and is in m-optimised.mar." in page
    assert '<td class="good">the best</td>' in page
    assert '<td class="bad">alone: scores has a mean error of 0.2</td>' in page
    assert '<td class="bad">openvino is not installed</td>' in page
    assert "3.00 [2.70 to 3.30]" in page


def test_a_noisy_interval_is_said_to_be_one_and_leaves_the_picture_its_scale() -> None:
    """Its line ends at the picture's edge."""
    noisy = {"rows": 1, "threads": 1, "middle": 5.74, "low": 2.81, "high": 477.16}
    page = write_page(report(build("onnx", ratios=[noisy]), build("bf16", ratio=2.0)), 0.03)

    assert "too noisy to say (2.81 to 477)" in page
    ends = [float(value or 0) for name, value in parsed(page).attributes if name in ("x1", "x2", "cx")]
    assert 0 <= min(ends) < max(ends) <= WIDTH


def test_hostile_names_and_reasons_are_text() -> None:
    """Nothing of them becomes a tag or an attribute, and nothing may run."""
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    page = write_page(
        {**report(build(evil, passed=False, faults=[evil]), winner=evil), "modelName": evil, "notes": [evil]}, 0.03
    )

    tags = parsed(page)
    assert not {"script", "img"} & set(tags.seen)
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert "default-src 'none'" in page


def test_without_a_measured_build_there_is_no_picture_and_it_is_said() -> None:
    """The parent stays."""
    page = write_page(report(build("onnx", error=None, ratios=[], passed=False, whyNot="no")), 0.03)

    assert "svg" not in parsed(page).seen
    assert "No build was both compared and measured." in page
    assert "The parent stays" in page


def test_the_picture_alone_is_a_whole_svg_and_says_where_there_is_nothing_to_show() -> None:
    """With its own colours, and the namespace that a file of its own needs."""
    drawn = write_picture(report(build("onnx", ratio=3.0), build("<b>", passed=False)), 0.03)
    nothing = write_picture(report(build("onnx", error=None, ratios=[], passed=False)), 0.03)

    circles = ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}circle")
    assert [circle.get("class") for circle in circles] == ["good", "bad"]
    assert ".good {" in drawn
    assert "No build was both compared" in "".join(ElementTree.fromstring(nothing).itertext())


@pytest.mark.parametrize(("goal", "rows"), [("latency", 1), ("throughput", 8), ("memory", 8)])
def test_the_picture_is_of_the_batch_size_that_the_goal_is_about(goal: str, rows: int) -> None:
    """One row, or a full batch."""
    page = write_page(report(build("onnx"), goal=goal), 0.03)

    assert ("one row at a time" in page) is (rows == 1)


def test_ratios_of_one_thread_and_of_a_workers_share_stand_beside_each_other_and_the_share_is_drawn() -> None:
    """What serves has the share; one thread is what many workers have."""
    ratios = [
        {"rows": 8, "threads": threads, "middle": middle, "low": middle, "high": middle}
        for threads, middle in ((4, 1.5), (1, 2.5))
    ]
    page = write_page({**report(build("onnx", ratios=ratios), goal="throughput"), "threads": 4}, 0.03)

    parsed(page)
    assert "times as fast at 8 rows, 1 thread<" in page
    assert "times as fast at 8 rows, 4 threads<" in page
    assert "onnx: 1.50 times as fast" in page
    assert page.index("2.50 [") < page.index("1.50 [")  # one thread first


def test_a_build_without_any_error_is_drawn_at_the_least_and_one_without_bounds_is_not() -> None:
    """The axis is logarithmic."""
    points = points_of([build("same", error=0.0), build("zeros", error=float("inf"))], 1, 1)

    assert [(point.name, point.error) for point in points] == [("same", LEAST_ERROR)]
    parsed(write_page(report(build("same", error=0.0)), 0.03))


@pytest.mark.parametrize("bound", [0.0, 1e-300, 1e300, float("inf")])
def test_a_bound_without_a_place_on_the_axis_is_drawn_at_its_end(bound: float) -> None:
    """`--max-error 0` has no logarithm, and its page is written after the search, which took minutes."""
    for error in (0.0, 0.5):
        page = write_page(report(build("same", error=error)), bound)

        drawn = [value or "" for name, value in parsed(page).attributes if name in ("y1", "y2", "cy")]
        assert all(0 <= float(place) <= HEIGHT for place in drawn), drawn
        assert f"mean error {bound:g}" in page
