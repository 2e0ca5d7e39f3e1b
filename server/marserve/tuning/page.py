"""The report of a search as one HTML page: what each setting was foreseen to do, and what the measured ones did. Pure.

The page has no script and asks for nothing else; names, which come from servers, are text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from marserve.tuning.search import Found, Row

WIDTH, LINE, LEFT, MARGIN = 760, 26, 300, 90
SHOWN: Final = 20
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --line: #d0d7de; --bar: #9ec5fe; --good: #1a7f37; --ground: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --line: #3a424d; --bar: #2f5d9b; --good: #4ac26b; --ground: #14181d; }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
}
svg { width: 100%; height: auto; }
text { fill: var(--ink); font-size: 12px; }
.bar { fill: var(--bar); }
.measured { fill: var(--good); }
.best { font-weight: bold; }
pre { border: 1px solid var(--line); padding: .6rem; overflow-x: auto; }
"""


def write_page(name: str, goal: str, result: str, found: Found, patch: str) -> str:
    """The page of a search."""
    rows = [row for row in found.rows if row.foreseen > 0]
    shown = [*([found.present] if found.present is not None else []), *rows]
    shown = [row for number, row in enumerate(shown) if row not in shown[:number]]
    shown = shown[:1] + [row for row in shown[1:] if row.measured is not None or row in rows[:SHOWN]]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(name)} tuned</title><style>{_STYLE}</style></head><body>",
            f"<h1>Settings of {escape(name)}</h1>",
            f"<p>The goal was {escape(goal)}. {escape(result)}</p>",
            _picture(shown, found),
            "<p>Bars: the highest rate that keeps the goal, by the simulation. Dots: as it was measured.</p>",
            f"<pre>{escape(patch)}</pre>" if patch else "",
            *(f"<p>{escape(note)}</p>" for note in found.notes),
            "</body></html>",
            "",
        ]
    )


def _picture(rows: Sequence[Row], found: Found) -> str:
    """A line for each setting: its bar, its dot, its figures."""
    if not rows:
        return "<p>No setting keeps the goal.</p>"
    most = max(max(row.foreseen, row.measured or 0.0) for row in rows) or 1.0
    wide = WIDTH - LEFT - MARGIN
    said = "; ".join(f"{row.setting}: {_figures(row)}" for row in rows)
    drawn = [f'<svg viewBox="0 0 {WIDTH} {LINE * len(rows) + 10}" role="img" aria-label="{escape(said, quote=True)}">']
    for number, row in enumerate(rows):
        top = LINE * number
        kind = ' class="best"' if row is found.best else ""
        present = " (now)" if row is found.present else ""
        drawn += [
            f'<text{kind} x="{LEFT - 8}" y="{top + 17}" text-anchor="end">{escape(str(row.setting))}{present}</text>',
            f'<rect class="bar" x="{LEFT}" y="{top + 5}" width="{wide * row.foreseen / most:.1f}" height="16"/>',
            f'<text x="{WIDTH - 4}" y="{top + 17}" text-anchor="end">{_figures(row)}</text>',
        ]
        if row.measured is not None:
            at = LEFT + wide * row.measured / most
            drawn.append(f'<circle class="measured" cx="{at:.1f}" cy="{top + 13}" r="5"/>')
    return "\n".join([*drawn, "</svg>"])


def _figures(row: Row) -> str:
    measured = "" if row.measured is None else f", {row.measured:.0f}"
    return f"{row.foreseen:.0f}{measured} /s"
