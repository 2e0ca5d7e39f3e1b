"""Finds the setting that keeps a goal at the highest rate: learns costs, simulates all settings, measures a few. Pure.

What a batch costs depends on the layout and on its size. So some batches of a few sizes tell what every setting of a
layout would do, by the real dispatcher under a clock that jumps. The best few, with the best delay of each, are then
measured: what was not seen (a machine that has less than it says, costs with a step) shows there.

A goal for a percentile is measured from rate to rate: a little below the foreseen one, then further up where it is
kept, and down where it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from marserve.tuning.costs import Costs
from marserve.tuning.settings import KEPT, Goal, Layout, Setting
from marserve.tuning.simulated import IDLE, Batching, highest_rate

PROBED_SIZES: Final = (1, 8, 32)
PROBES: Final = 15
MEASURED: Final = 5
LEAST_REQUESTS: Final = 600
MOST_TRIALS: Final = 3
_FIRST_SHARE, _UP, _OF_ANSWERED = 0.92, 1.08, 0.92
# What is left of a rate after each that did not keep the goal: a machine that others use has less than was foreseen.
_DOWN: Final = (0.85, 0.7, 0.5, 0.5)


class Sample(NamedTuple):
    """One measurement: the rate that was answered, a second, and the goal's percentile, None without enough answers."""

    rate: float
    percentile_s: float | None = None
    failed: int = 0


class Trials(Protocol):
    """What the search asks of the outside world."""

    def batch_s(self, layout: Layout, size: int, batches: int) -> Sequence[float]:
        """How long batches of a size took under a layout, in seconds; empty where none was answered."""

    def seen_costs(self, layout: Layout) -> Sequence[tuple[int, int, float]]:
        """Of a version whose policy finds the size of batches: length, size and seconds of those that it formed under
        loads of several widths; the length is 1 where it knows none.
        """

    def measure(self, setting: Setting, rate: float | None, requests: int) -> Sample:
        """A measurement with so many requests: at a rate, or as fast as they are answered."""

    def has_time(self) -> bool:
        """Whether another measurement may begin."""


@dataclass(slots=True)
class Row:
    """A setting: the rate that the simulation foresees, and the one that was measured, None where it was not.

    `samples` are the rates that were tried and what was seen at each; `failed` how many requests were not answered.
    """

    setting: Setting
    foreseen: float
    measured: float | None = None
    samples: list[tuple[float | None, Sample]] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """How many requests were not answered well."""
        return sum(sample.failed for _, sample in self.samples)

    @property
    def is_exact(self) -> bool:
        """Whether the rate was measured, and not found by trying some."""
        return any(rate is None for rate, _ in self.samples)


@dataclass(slots=True)
class Found:
    """All settings, the best foreseen one first, and what their layouts' batches cost. `present` is how it is now."""

    rows: list[Row]
    costs: dict[Layout, Costs]
    present: Row | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Row | None:
        """The one with the highest measured rate; None where none kept the goal.

        Of those whose rates are nearer to each other than the steps that were tried it is the best foreseen one: 600
        requests show a p99 by six of them, and the simulation knows more.
        """
        measured = [row for row in self.rows if row.measured]
        most = max((row.measured or 0.0 for row in measured), default=0.0)
        near = [row for row in measured if row.is_exact or (row.measured or 0.0) * _UP >= most]
        return max(near, key=lambda row: (row.measured if row.is_exact else row.foreseen) or 0.0, default=None)


def search(
    settings: Sequence[Setting],
    goal: Goal,
    trials: Trials,
    *,
    batching: Batching = IDLE,
    present: Setting | None = None,
) -> Found:
    """Probe, simulate, measure. `present` is measured first, as all others are, and beside them."""
    costs = learn(settings, trials, batching, present)
    rows = rank(settings, goal, costs, batching)
    found = Found(rows, costs)
    chosen = choose(rows)
    if present is not None and present.layout in costs:
        foreseen = highest_rate(present, costs[present.layout].cost, goal, batching=batching)
        found.present = next((row for row in chosen if row.setting == present), Row(present, foreseen))
        chosen = [found.present, *(row for row in chosen if row is not found.present)]
    for number, row in enumerate(_by_build(chosen)):
        if trials.has_time():
            measure(row, goal, trials)
        if row.measured is None:
            left = len(chosen) - number
            found.notes.append(
                f"Time was up: {left} of the best settings {'was' if left == 1 else 'were'} not measured."
            )
            break
    return found


def learn(
    settings: Iterable[Setting], trials: Trials, batching: Batching = IDLE, present: Setting | None = None
) -> dict[Layout, Costs]:
    """What batches cost under each layout, from some of a few sizes; layouts without an answer are left out."""
    if batching.goal_s is not None:
        return _learn_seen([setting.layout for setting in settings], trials, present)
    most: dict[Layout, int] = {}
    for setting in settings:
        most[setting.layout] = max(setting.batch_size, most.get(setting.layout, 1))
    learned: dict[Layout, Costs] = {}
    for layout, largest in sorted(most.items(), key=lambda each: (each[0].build, each[0].workers)):
        costs = Costs()
        for size in sorted({*(size for size in PROBED_SIZES if size < largest), largest}):
            if not trials.has_time():
                break
            for seconds in trials.batch_s(layout, size, PROBES):
                costs.learn(size, seconds)
        if not costs.is_empty:
            learned[layout] = costs
    return learned


def _learn_seen(layouts: Iterable[Layout], trials: Trials, present: Setting | None) -> dict[Layout, Costs]:
    """The costs of layouts, which are alike for all paddings: those of the present one are looked at, if it has any."""
    learned: dict[Layout, Costs] = {}
    tried: dict[Layout, Costs] = {}
    padding = KEPT if present is None else present.layout.padding
    for layout in sorted(set(layouts), key=lambda each: (each.build, each.workers)):
        looked_at = layout if layout.padding == KEPT else replace(layout, padding=padding)
        if looked_at not in tried:
            tried[looked_at] = Costs()
            if trials.has_time():
                for length, size, seconds in trials.seen_costs(looked_at):
                    tried[looked_at].learn(size, seconds, length)
        if not tried[looked_at].is_empty:
            learned[layout] = tried[looked_at]
    return learned


def _by_build(rows: Iterable[Row]) -> list[Row]:
    """The rows of each build together, in the order in which its best one comes: each is loaded once."""
    builds: dict[object, list[Row]] = {}
    for row in rows:
        builds.setdefault(row.setting.layout.build, []).append(row)
    return [row for rows in builds.values() for row in rows]


def rank(
    settings: Iterable[Setting], goal: Goal, costs: Mapping[Layout, Costs], batching: Batching = IDLE
) -> list[Row]:
    """What each setting would do, the best first; among equals the smaller batch, and the shorter delay."""
    rows = [
        Row(setting, highest_rate(setting, costs[setting.layout].cost, goal, batching=batching))
        for setting in settings
        if setting.layout in costs
    ]
    return sorted(rows, key=lambda row: (-round(row.foreseen, 6), row.setting))


def choose(rows: Sequence[Row], count: int = MEASURED) -> list[Row]:
    """The best few by what is foreseen, of each layout and size the best delay alone."""
    chosen: dict[tuple[Layout, int], Row] = {}
    for row in rows:
        if row.foreseen > 0:
            chosen.setdefault((row.setting.layout, row.setting.batch_size), row)
    return list(chosen.values())[:count]


def measure(row: Row, goal: Goal, trials: Trials, requests: int = LEAST_REQUESTS) -> None:
    """Measure a setting: its rate is the highest one at which it kept the goal, 0 for none.

    Where even a request alone is foreseen to take longer, there is no rate to begin with: nothing is sent. None where
    time was up before anything was known.
    """
    row.measured = 0.0
    if goal.seconds is None:
        sample = trials.measure(row.setting, None, requests)
        row.samples.append((None, sample))
        row.measured = sample.rate
        return
    rate = _FIRST_SHARE * row.foreseen
    if not rate:
        return
    was_kept: bool | None = None
    missed = 0
    while True:
        sample = trials.measure(row.setting, rate, requests)
        row.samples.append((rate, sample))
        if sample.failed and not sample.rate:
            return  # nothing is answered at all
        if sample.percentile_s is None and not sample.failed and not trials.has_time():
            row.measured = row.measured or None  # cut off: it says nothing
            return
        is_kept = sample.percentile_s is not None and sample.percentile_s <= goal.seconds and not sample.failed
        if is_kept:
            row.measured = max(row.measured, rate)
        if was_kept is not None and is_kept != was_kept:
            return  # between the two lies the highest rate
        was_kept = is_kept
        if is_kept:
            rate *= _UP
        elif missed < len(_DOWN):  # a version that has too much to do shows what it can
            rate = min(_DOWN[missed] * rate, _OF_ANSWERED * sample.rate or rate)
            missed += 1
        else:
            return
        if (is_kept and len(row.samples) == MOST_TRIALS) or not trials.has_time():
            return
