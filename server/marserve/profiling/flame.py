"""Stacks, and pictures of them: a box a call, as wide as its time, those that it called above it. Pure.

The pictures have no script. Names come from models and their code, and are text.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from marserve.answers.profiles import ProfileStack
from marserve.profiling.trace import Span, Trace

MOST_STACKS: Final = 2000
MOST_DEPTH: Final = 64
MAX_NAME: Final = 200
WIDTH: Final = 1200
ROW: Final = 18
# A narrower box is left out, and a narrower one than the second has no name.
LEAST_WIDTH, LEAST_NAMED = 0.5, 30.0
_LETTER: Final = 6.6  # the width of one, in the picture's units
_HUES: Final = (8, 48)


def operator_stacks(traces: Iterable[Trace]) -> list[ProfileStack]:
    """Each stack of operators with the milliseconds that its innermost one took by itself."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for trace in traces:
        for outermost in trace.operators.values():
            waiting: list[tuple[tuple[str, ...], Span]] = [((), span) for span in outermost]
            while waiting:
                above, span = waiting.pop()
                path = (*above, span.name)
                sums[path] += span.own_us / 1000
                if len(path) < MOST_DEPTH:
                    waiting += [(path, called) for called in span.calls]
    return _longest(sums)


def python_stacks(collapsed: str) -> list[ProfileStack]:
    """Stacks as py-spy writes them: `outer;inner 12` a line. Lines that are none are left out."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for line in collapsed.splitlines():
        names, _, samples = line.rpartition(" ")
        if names and samples.isdecimal() and len(samples) < 12:
            sums[tuple(name[:MAX_NAME] for name in names.split(";")[:MOST_DEPTH])] += int(samples)
    return _longest(sums)


def _longest(sums: dict[tuple[str, ...], float]) -> list[ProfileStack]:
    longest = sorted(sums.items(), key=lambda each: -each[1])[:MOST_STACKS]
    return [ProfileStack(list(path), round(value, 4)) for path, value in longest if value > 0]


class _Box:
    def __init__(self) -> None:
        self.value = 0.0
        self.called: dict[str, _Box] = {}


def draw(stacks: Sequence[ProfileStack], title: str, unit: str) -> str:
    """The picture of stacks as SVG; `unit` is that of their values, as `ms` or `samples`."""
    root = _Box()
    for stack in stacks:
        box = root
        box.value += stack.value
        for name in stack.names:
            box = box.called.setdefault(name, _Box())
            box.value += stack.value
    depth = max((len(stack.names) for stack in stacks), default=0)
    height = (depth + 2) * ROW + 8
    boxes: list[str] = []
    waiting = [("all", root, 0.0, 0)] if root.value else []
    while waiting:
        name, box, left, level = waiting.pop()
        width = box.value / root.value * WIDTH
        if not width >= LEAST_WIDTH:  # also where values are so large that their share is no number
            continue
        boxes.append(_drawn(name, box.value, box.value / root.value, left, width, height - (level + 1) * ROW, unit))
        at = left
        for called, inner in sorted(box.called.items()):
            waiting.append((called, inner, at, level + 1))
            at += inner.value / root.value * WIDTH
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="ui-monospace, monospace" font-size="11">',
            f"<title>{_text(title)}</title>",
            f'<text x="4" y="13" fill="#777">{_text(title)}</text>',
            *boxes,
            "</svg>",
        ]
    )


def _drawn(name: str, value: float, share: float, left: float, width: float, top: float, unit: str) -> str:
    hue = _HUES[0] + zlib.crc32(name.encode("utf-8", "replace")) % (_HUES[1] - _HUES[0])
    said = f"{name}: {value:.4g} {unit}, {share:.1%}"
    fits = int((width - 6) / _LETTER)
    shown = name if len(name) <= fits else name[: max(0, fits - 1)] + "…"
    label = (
        f'<text x="{left + 3:.1f}" y="{top + 12.5:.1f}" fill="#1b1f24">{_text(shown)}</text>'
        if width >= LEAST_NAMED
        else ""
    )
    return (
        f"<g><title>{_text(said)}</title>"
        f'<rect x="{left:.2f}" y="{top:.1f}" width="{max(0.3, width - 0.6):.2f}" height="{ROW - 1}" rx="2" '
        f'fill="hsl({hue} 75% 68%)"/>{label}</g>'
    )


def _text(text: str) -> str:
    """As text of a document; characters that XML cannot carry are replaced."""
    return escape("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text))
