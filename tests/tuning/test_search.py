"""Probe, simulate, measure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from marserve.tuning.search import LEAST_REQUESTS, MEASURED, Found, Row, Sample, choose, learn, measure, rank, search
from marserve.tuning.settings import FOUND, Goal, Layout, Setting, space
from marserve.tuning.simulated import Batching


@dataclass
class Machine:
    """Batches of 4 ms and 1 ms an item; what was asked for. `time` is how often it still has time."""

    processors: int = 2
    slow: frozenset[int] = frozenset()
    time: int = 1000
    probed: list[tuple[Layout, int]] = field(default_factory=list)
    measured: list[tuple[Setting, float | None, int]] = field(default_factory=list)

    def batch_s(self, layout: Layout, size: int, batches: int) -> Sequence[float]:
        """No noise."""
        self.probed.append((layout, size))
        return [(0.004 + 0.001 * size) * max(1.0, layout.workers / self.processors)] * batches

    def seen_costs(self, layout: Layout) -> Sequence[tuple[int, int, float]]:
        """As `batch_s`, for two lengths."""
        self.probed.append((layout, 0))
        return [(length, size, 0.004 + 0.0001 * length * size) for length in (10, 100) for size in (1, 8)]

    def measure(self, setting: Setting, rate: float | None, requests: int) -> Sample:
        """The goal is kept up to 100 a second for each worker, or never with a slow batch size."""
        self.measured.append((setting, rate, requests))
        if rate is None:
            return Sample(100.0 * setting.layout.workers)
        is_kept = rate <= 100.0 * setting.layout.workers and setting.batch_size not in self.slow
        return Sample(min(rate, 100.0 * setting.layout.workers), 0.01 if is_kept else 1.0)

    def has_time(self) -> bool:
        """So often."""
        self.time -= 1
        return self.time >= 0


LAYOUTS = [Layout(1), Layout(2), Layout(4)]
SETTINGS = space(LAYOUTS, batch_sizes=(1, 4, 8), delays_s=(0.0,))
GOAL = Goal(0.99, 0.05)


def test_a_few_sizes_of_each_layout_are_probed_and_no_setting_twice() -> None:
    """And its largest batch."""
    machine = Machine()

    costs = learn(space(LAYOUTS, batch_sizes=(1, 2, 16)), machine)

    assert machine.probed == [(layout, size) for layout in LAYOUTS for size in (1, 8, 16)]
    assert costs[Layout(1)].cost(8) == pytest.approx(0.012)
    assert costs[Layout(1)].cost(12) == pytest.approx(0.016)


def test_the_best_layout_is_foreseen_and_the_best_five_are_measured() -> None:
    """Four workers on two processors are no better than two; each of the five has its best delay."""
    machine = Machine()

    found = search(SETTINGS, GOAL, machine)

    assert found.rows[0].setting.layout.workers == 2
    settings = list(dict.fromkeys(setting for setting, _, _ in machine.measured))
    assert len(settings) == MEASURED
    assert len({(setting.layout, setting.batch_size) for setting in settings}) == MEASURED
    assert all(requests >= LEAST_REQUESTS for _, _, requests in machine.measured)
    assert found.best is not None
    assert found.best.measured == max(row.measured or 0 for row in found.rows)


def test_a_rate_is_measured_up_while_the_goal_is_kept_and_down_while_it_is_not() -> None:
    """It ends between the two, after three upwards or after five downwards, in ever larger steps."""
    up, down, never = (
        Row(Setting(Layout(1), 4, 0.0), 95.0),
        Row(Setting(Layout(1), 4, 0.0), 120.0),
        Row(Setting(Layout(1), 8, 0.0), 100.0),
    )
    machine = Machine(slow=frozenset({8}))

    for row in (up, down, never):
        measure(row, GOAL, machine)

    assert [rate for rate, _ in up.samples] == pytest.approx([87.4, 94.392, 101.943], abs=0.01)
    assert up.measured == pytest.approx(94.392)
    assert [rate for rate, _ in down.samples] == pytest.approx([110.4, 92.0])
    assert down.measured == pytest.approx(92.0)
    assert (never.measured, len(never.samples)) == (0.0, 5)
    assert never.samples[-1][0] == pytest.approx(0.92 * 100 * 0.85 * 0.7 * 0.5 * 0.5)


def test_nothing_is_sent_to_a_setting_that_keeps_the_goal_at_no_rate_by_the_simulation() -> None:
    """Not even to the present one, which is measured beside the best."""
    machine, present = Machine(), Setting(Layout(1), 4, 0.0)

    found = search(SETTINGS, Goal(0.99, 0.0001), machine, present=present)

    assert machine.measured == []
    assert found.present is not None
    assert (found.present.foreseen, found.present.measured, found.best) == (0.0, 0.0, None)


def test_failed_requests_and_unknown_percentiles_keep_no_goal() -> None:
    """However quick the others are."""

    class Failing(Machine):
        def measure(self, setting: Setting, rate: float | None, requests: int) -> Sample:
            return Sample(rate or 0.0, None if setting.batch_size == 1 else 0.001, setting.batch_size - 1)

    for size in (1, 2):
        row = Row(Setting(Layout(1), size, 0.0), 100.0)
        measure(row, GOAL, Failing())
        assert row.measured == 0.0


def test_the_present_setting_is_measured_beside_the_best() -> None:
    """First, and once."""
    machine, present = Machine(), Setting(Layout(1), 3, 0.005)

    found = search(SETTINGS, Goal(), machine, present=present)

    assert found.present is not None
    assert machine.measured[0][0] == found.present.setting == present
    assert len({setting for setting, _, _ in machine.measured}) == MEASURED + 1


def test_when_time_is_up_what_was_measured_counts() -> None:
    """And it is said how much was not."""
    machine = Machine(time=10)

    found = search(SETTINGS, GOAL, machine)

    assert 0 < len({setting for setting, _, _ in machine.measured}) < MEASURED
    assert found.best is not None
    assert "of the best settings were not measured" in found.notes[0]


def test_a_layout_that_answers_nothing_is_left_out() -> None:
    """Without any there is no best one."""

    class Broken(Machine):
        def batch_s(self, layout: Layout, size: int, batches: int) -> Sequence[float]:
            return [] if layout.workers < 4 else super().batch_s(layout, size, batches)

    found = search(SETTINGS, GOAL, Broken())

    assert {row.setting.layout.workers for row in found.rows} == {4}
    assert search(space([Layout(1)]), GOAL, Broken()).best is None


def test_for_the_highest_rate_at_all_each_is_measured_once() -> None:
    """As fast as it is answered."""
    machine = Machine()

    found = search(SETTINGS, Goal(), machine)

    assert [rate for _, rate, _ in machine.measured] == [None] * MEASURED
    assert found.best is not None
    assert found.best.setting.layout.workers == 4  # it is what was measured that counts


def test_among_equals_the_smaller_batch_is_ranked_first() -> None:
    """Its requests wait for fewer mates; settings that never keep the goal are not measured."""
    rows = [Row(setting, 0.0) for setting in space([Layout(1)])]
    costs = learn(space([Layout(1)]), Machine())
    ranked = rank(space([Layout(1)], batch_sizes=(1,), delays_s=(0.0, 0.01)), GOAL, costs)

    assert choose(rows) == []
    assert [row.setting.delay_s for row in ranked] == [0.0]


def test_each_build_is_probed_and_measured_in_one_go() -> None:
    """A copy with other threads is loaded for each, so that going to and fro would take minutes."""
    machine = Machine(processors=4)
    threads = [Layout(workers, "1", threads) for workers in (1, 2) for threads in (1, 2)]

    search(space(threads, batch_sizes=(1, 4, 8), delays_s=(0.0,)), GOAL, machine, present=Setting(threads[0], 1, 0.0))

    for layouts in ([layout for layout, _ in machine.probed], [setting.layout for setting, *_ in machine.measured]):
        builds = [layout.build for layout in layouts]
        changes = sum(before != after for before, after in itertools.pairwise(builds))
        assert changes == len(set(builds)) - 1
    assert {layout.threads for layout, _ in machine.probed} == {1, 2}


def test_what_a_version_has_learned_is_looked_at_once_for_all_paddings() -> None:
    """Costs do not depend on them, and each is a copy that would be loaded."""
    machine = Machine()
    layouts = [Layout(workers, "1", 1, padding) for workers in (1, 2) for padding in (0.1, 0.25, 0.5)]
    settings = space(layouts, batch_sizes=(8,), delays_s=(FOUND,))

    costs = learn(settings, machine, Batching(goal_s=0.1, length_from="body_bytes"), Setting(layouts[1], 8, FOUND))

    assert machine.probed == [(Layout(workers, "1", 1, 0.25), 0) for workers in (1, 2)]
    assert set(costs) == set(layouts)
    assert costs[layouts[0]].cost(8, 100) == pytest.approx(0.084)


def test_a_measurement_that_time_cut_off_says_nothing_and_is_counted_as_left_out() -> None:
    """Else a setting would be told to keep the goal at no rate, which nobody has seen."""

    @dataclass
    class Hasty(Machine):
        def measure(self, setting: Setting, rate: float | None, requests: int) -> Sample:
            super().measure(setting, rate, requests)
            if len(self.measured) == 2:
                self.time = 0
                return Sample(rate or 0.0)  # too few answers for the percentile
            return Sample(rate or 0.0, 1.0)

    found = search(SETTINGS, GOAL, Hasty(slow=frozenset({1})), present=Setting(Layout(1), 1, 0.0))

    assert found.present is not None
    assert found.present.measured is None
    assert found.notes == [f"Time was up: {MEASURED + 1} of the best settings were not measured."]


def test_of_rates_that_the_steps_do_not_tell_apart_the_foreseen_one_is_the_best() -> None:
    """A rate that was measured as such, and one that is surely higher, need no help."""

    def row(size: int, foreseen: float, measured: float, rate: float | None) -> Row:
        return Row(Setting(Layout(1), size, 0.0), foreseen, measured, [(rate, Sample(measured, 0.01))])

    near = Found([row(1, 800, 622, 622), row(2, 700, 647, 647)], {})
    apart = Found([row(1, 800, 590, 590), row(2, 700, 647, 647)], {})
    exact = Found([row(1, 800, 622, None), row(2, 700, 647, None)], {})

    assert [found.best.setting.batch_size for found in (near, apart, exact) if found.best] == [1, 2, 2]
    assert Found([], {}).best is None
