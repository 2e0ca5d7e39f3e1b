"""The report of a search as one HTML page: what each build showed, and its error beside how fast it is. Pure.

The page has no script and asks for nothing else; names and reasons, which come from archives and libraries, are text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from marserve.optimise.candidates import rows_of
from marserve.optimise.ratio import Ratio

WIDTH, HEIGHT, MARGIN = 640, 320, 56
# What has no error at all is drawn here: the axis is logarithmic.
LEAST_ERROR: Final = 1e-8
# The highest place of the bound: errors that large are of answers that have nothing in common.
MOST_ERROR: Final = 1e3
# The ends of the picture's axis: an interval that other work on the machine made wide is cut off there.
LEAST_RATIO: Final = 1 / 16
MOST_RATIO: Final = 64.0
_NOTHING: Final = "No build was both compared and measured."
_STYLE: Final = """
:root {
  color-scheme: light dark;
  --ink: #1b1f24; --dim: #5a6472; --line: #d0d7de; --good: #1a7f37; --bad: #b42318; --ground: #fff;
}
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --dim: #9aa4b2; --line: #3a424d; --good: #4ac26b; --bad: #ff7b72; --ground: #14181d; }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
}
table { border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { width: 100%; height: auto; }
text { fill: var(--ink); font-size: 12px; }
.axis { stroke: var(--line); }
.dim { fill: var(--dim); }
.good { fill: var(--good); color: var(--good); }
.bad { fill: var(--bad); color: var(--bad); }
.bound { stroke: var(--bad); stroke-dasharray: 4 4; }
"""


@dataclass(frozen=True, slots=True)
class Point:
    """A build in the picture: its ratio with its interval, and its mean error, both above zero."""

    name: str
    ratio: float
    low: float
    high: float
    error: float
    has_passed: bool


def write_page(report: Mapping[str, Any], max_error: float) -> str:
    """The page of a report, as `marserve optimise --json` has it."""
    name = f"{report['modelName']} {report['modelVersion']}"
    winner = report["winner"]
    result = (
        f"{winner} is the best, and is in {report['archive']}."
        if winner
        else "The parent stays: no build is equal and surely better."
    )
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(name)} optimised</title><style>{_STYLE}</style></head><body>",
            f"<h1>Builds of {escape(name)}</h1>",
            f"<p>{escape(result)}</p>",
            f"<p>{report['calibrated']} inputs calibrated, {report['compared']} were compared, in "
            f"{report['seconds']:.0f} s. The goal was {escape(report['goal'])}.</p>",
            _picture_of(report, max_error) or f"<p>{_NOTHING}</p>",
            _table(report["builds"], report["batchSize"], report["threads"], winner),
            *(f"<p>{escape(note)}</p>" for note in report["notes"]),
            "</body></html>",
            "",
        ]
    )


def write_picture(report: Mapping[str, Any], max_error: float) -> str:
    """The page's picture as an SVG file of its own, for other pages; it says so where no build was measured."""
    empty = f'<svg viewBox="0 0 {WIDTH} {MARGIN}"><text x="{MARGIN}" y="{MARGIN / 2:g}">{_NOTHING}</text></svg>'
    picture = _picture_of(report, max_error) or empty
    opening, rest = picture.split(">", 1)
    return f'{opening} xmlns="http://www.w3.org/2000/svg">\n<style>{_STYLE}</style>{rest}\n'


def _picture_of(report: Mapping[str, Any], max_error: float) -> str:
    rows, threads = rows_of(report["goal"], report["batchSize"]), report["threads"]
    points = points_of(report["builds"], rows, threads)
    return _picture(points, rows, threads, max_error) if points else ""


def points_of(builds: Sequence[Mapping[str, Any]], rows: int, threads: int) -> list[Point]:
    """The builds that were both compared, and measured with so many rows and threads."""
    points = []
    for build in builds:
        ratios = [ratio for ratio in build["ratios"] if (ratio["rows"], ratio["threads"]) == (rows, threads)]
        errors = [output["meanError"] for output in build["outputs"] if math.isfinite(output["meanError"])]
        if ratios and errors:
            ratio = ratios[0]
            points.append(
                Point(
                    build["name"],
                    ratio["middle"],
                    ratio["low"],
                    ratio["high"],
                    max(LEAST_ERROR, *errors),
                    build["passed"],
                )
            )
    return points


def _picture(points: Sequence[Point], rows: int, threads: int, max_error: float) -> str:
    """Error over ratio, both logarithmic: what lies to the right is faster, what lies below is closer."""
    low = max(LEAST_RATIO, min(0.5, *(point.low for point in points)))
    high = min(MOST_RATIO, max(2.0, *(point.high for point in points)))
    least = min(LEAST_ERROR, *(point.error for point in points))
    # The bound is drawn inside of the picture, also where none at all is allowed, or any.
    bound = min(MOST_ERROR, max(LEAST_ERROR, max_error))
    most = max(bound * 2, *(point.error for point in points))

    def x(ratio: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * _share(min(high, max(low, ratio)), low, high)

    def y(error: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * _share(error, least, most)

    what = "one row at a time" if rows == 1 else f"{rows} rows at a time"
    said = "; ".join(f"{point.name}: {point.ratio:.2f} times as fast, mean error {point.error:.2g}" for point in points)
    drawn = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(said, quote=True)}">',
        f'<line class="axis" x1="{MARGIN}" y1="{HEIGHT - MARGIN}" x2="{WIDTH - MARGIN}" y2="{HEIGHT - MARGIN}"/>',
        f'<line class="axis" x1="{x(1):.1f}" y1="{MARGIN}" x2="{x(1):.1f}" y2="{HEIGHT - MARGIN}"/>',
        f'<text class="dim" x="{x(1):.1f}" y="{MARGIN - 8}" text-anchor="middle">the parent</text>',
        f'<line class="bound" x1="{MARGIN}" y1="{y(bound):.1f}" x2="{WIDTH - MARGIN}" y2="{y(bound):.1f}"/>',
        f'<text class="dim" x="{MARGIN}" y="{y(bound) - 5:.1f}">mean error {max_error:g}</text>',
    ]
    below = HEIGHT - MARGIN + 18
    drawn += [
        f'<text class="dim" x="{x(tick):.1f}" y="{below}" text-anchor="middle">{tick:g}</text>'
        for tick in (0.25, 0.5, 1, 2, 4, 8, 16)
        if low <= tick <= high
    ]
    title = f"times as fast, {what}, {_threads(threads)}, with the interval"
    drawn.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">{title}</text>')
    for point in points:
        kind = "good" if point.has_passed else "bad"
        at = y(point.error)
        named = at + 18 if 0 <= at - y(bound) < 24 else at - 9  # not across the line of the bound
        drawn += [
            f'<line class="axis" x1="{x(point.low):.1f}" y1="{at:.1f}" x2="{x(point.high):.1f}" y2="{at:.1f}"/>',
            f'<circle class="{kind}" cx="{x(point.ratio):.1f}" cy="{at:.1f}" r="5"/>',
            f'<text x="{x(point.ratio):.1f}" y="{named:.1f}" text-anchor="middle">{escape(point.name)}</text>',
        ]
    return "\n".join([*drawn, "</svg>"])


def _table(builds: Sequence[Mapping[str, Any]], batch_size: int, threads: int, winner: str | None) -> str:
    columns = [(count, size) for count in sorted({1, threads}) for size in sorted({1, batch_size})]
    head = [
        "build",
        *(f"times as fast at {'1 row' if size == 1 else f'{size} rows'}, {_threads(count)}" for count, size in columns),
        "mean error",
        "agreement shown",
        "MB",
        "result",
    ]
    lines = ["<table><thead><tr>", *(f'<th scope="col">{escape(cell)}</th>' for cell in head), "</tr></thead><tbody>"]
    for build in builds:
        ratios = {(ratio["threads"], ratio["rows"]): ratio for ratio in build["ratios"]}
        errors = [output["meanError"] for output in build["outputs"]]
        agreement = build["agreement"]
        cells = [
            *(
                str(Ratio(ratios[column]["middle"], ratios[column]["low"], ratios[column]["high"]))
                if column in ratios
                else "–"
                for column in columns
            ),
            f"{max(errors):.2g}" if errors else "–",
            f"{math.floor(agreement['shown'] * 1000) / 10:g} %" if agreement else "–",
            f"{build['bytes'] / 1e6:.1f}" if build["bytes"] else "–",
        ]
        passed = "the best" if build["name"] == winner else "equal"
        why = passed if build["passed"] else build["whyNot"] or "; ".join(build["faults"][:3])
        kind = "good" if build["passed"] else "bad"
        lines.append(
            f'<tr><th scope="row">{escape(build["name"])}</th>'
            + "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)
            + f'<td class="{kind}">{escape(why)}</td></tr>'
        )
    return "\n".join([*lines, "</tbody></table>"])


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others, logarithmically: 0 to 1."""
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
