"""What a figure is: measurements of ours beside somebody else's, round by round, what they come to, and the goal.

Pure; `table` and `document` show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb
from statistics import median
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

MISSED = 0.05  # how often an interval may miss the true median
Comparison = Literal["ratio", "difference"]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure. `of` says on what: marserve's own value, or what it comes to beside the other's."""

    kind: Literal["at least", "at most"]
    bound: float
    of: Literal["own", "compared"]

    def is_met_by(self, value: float) -> bool:
        """Whether a value keeps the bound."""
        return value >= self.bound if self.kind == "at least" else value <= self.bound


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table. `own` and `other` are one value a round, in `unit`, taken side by side.

    `beside` names what `other` was measured on. A ratio is own / other, a difference own - other, each within a round;
    medians are taken last. `other` is empty where there is nothing to compare with.
    """

    name: str
    unit: str
    own: Sequence[float]
    beside: str = ""
    other: Sequence[float] = ()
    comparison: Comparison = "ratio"
    goal: Goal | None = None
    digits: int = 0

    @property
    def compared(self) -> float | None:
        """The median of the rounds' ratios or differences; None where nothing stands beside."""
        return median(self._each) if self.other else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between which two of the ratios or differences their true median is, at 95 %; None of fewer than six."""
        each = sorted(self._each)
        # Each of them is as likely below the true median as above it: how many are, is drawn as coins are tossed.
        tosses = accumulate(comb(len(each), heads) / 2 ** len(each) for heads in range(len(each)))
        left_out = sum(share <= MISSED / 2 for share in tosses)
        return (each[left_out - 1], each[-left_out]) if left_out else None

    @property
    def _each(self) -> list[float]:
        if not self.other:
            return []
        pairs = zip(self.own, self.other, strict=True)
        return [own / other if self.comparison == "ratio" else own - other for own, other in pairs]

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if self.goal is None:
            return None
        value = median(self.own) if self.goal.of == "own" else self.compared
        return value is not None and self.goal.is_met_by(value)

    def show(self, value: float) -> str:
        """A value with its unit."""
        return f"{value:,.{self.digits}f} {self.unit}"

    def show_compared(self, value: float) -> str:
        """A ratio or a difference as one writes it."""
        return f"{value:.2f} x" if self.comparison == "ratio" else f"{value:+,.{self.digits}f} {self.unit}"

    def show_interval(self) -> str:
        """The interval in brackets, empty where there is none."""
        return "" if self.interval is None else " ({} to {})".format(*map(self.show_compared, self.interval))

    def show_goal(self) -> str:
        """The goal in words, empty where there is none."""
        if self.goal is None:
            return ""
        show = self.show if self.goal.of == "own" else self.show_compared
        return f"{self.goal.kind} {show(self.goal.bound)}"


def table(figures: Sequence[Figure]) -> Table:
    """The figures for a terminal."""
    drawn = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("figure", "marserve", "beside", "its value", "compared", "goal", ""):
        drawn.add_column(heading, justify="left" if heading in ("figure", "beside", "goal", "") else "right")
    for figure in figures:
        compared = figure.compared
        drawn.add_row(
            figure.name,
            figure.show(median(figure.own)),
            figure.beside,
            figure.show(median(figure.other)) if figure.other else "",
            "" if compared is None else figure.show_compared(compared) + figure.show_interval(),
            figure.show_goal(),
            {None: "", True: "met", False: "missed"}[figure.is_met],
        )
    return drawn


def document(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """The figures with every round, for JSON."""
    return [
        {
            "name": figure.name,
            "unit": figure.unit,
            "marserve": {"median": median(figure.own), "rounds": list(figure.own)},
            "beside": figure.beside or None,
            "other": {"median": median(figure.other), "rounds": list(figure.other)} if figure.other else None,
            "comparison": figure.comparison if figure.other else None,
            "compared": figure.compared,
            "interval": figure.interval,
            "goal": figure.show_goal() or None,
            "is_met": figure.is_met,
        }
        for figure in figures
    ]
