"""The real dispatcher under a clock that jumps."""

from __future__ import annotations

import pytest

from marserve.messages import Part, Request
from marserve.tuning.settings import FOUND, Goal, Layout, Setting
from marserve.tuning.simulated import Batching, Simulated, highest_rate


def _cost(size: int) -> float:
    return 0.004 + 0.001 * size


def test_a_request_alone_takes_what_its_batch_costs() -> None:
    """No delay is waited for while a worker is idle."""
    ran = Simulated(Setting(Layout(1), 8, 0.1), _cost).run([0.0, 1.0, 2.0])

    assert ran.latencies == pytest.approx([0.005] * 3)


def test_the_policy_of_torchserve_waits_for_its_delay() -> None:
    """As the real dispatcher does: this is it."""
    ran = Simulated(Setting(Layout(1), 8, 0.1), _cost, Batching("fixed")).run([0.0])

    assert ran.latencies == pytest.approx([0.105])


def test_the_highest_rate_at_all_is_that_of_full_batches() -> None:
    """Eight of 12 ms on each of two workers."""
    rate = highest_rate(Setting(Layout(2), 8, 0.0), _cost, Goal())

    assert rate == pytest.approx(2 * 8 / 0.012, rel=0.03)


def test_a_goal_costs_rate_and_an_impossible_one_all_of_it() -> None:
    """No request is answered sooner than its own batch."""
    setting = Setting(Layout(1), 8, 0.0)

    assert 0 < highest_rate(setting, _cost, Goal(0.99, 0.02)) < highest_rate(setting, _cost, Goal(0.99, 0.05))
    assert highest_rate(setting, _cost, Goal(0.99, 0.004)) == 0.0


def test_the_same_seed_gives_the_same_rate() -> None:
    """Settings are compared under the same arrivals."""
    setting, goal = Setting(Layout(1), 4, 0.0), Goal(0.99, 0.02)

    assert highest_rate(setting, _cost, goal) == highest_rate(setting, _cost, goal)


def test_batches_of_about_one_length_are_formed_as_the_server_forms_them() -> None:
    """Where a batch costs what its longest item does, a version that allows less padding can do more."""
    short, long = (Request("r", [Part("body", b"x" * length)], []) for length in (10, 400))
    batching = Batching(goal_s=0.5, length_from="body_bytes", requests=(short, long))
    seen: list[tuple[int, int]] = []

    def cost(size: int, longest: int) -> float:
        seen.append((size, longest))
        return 0.002 + 0.0001 * size * longest

    rates = [
        highest_rate(Setting(Layout(1, padding=padding), 16, FOUND), cost, Goal(0.95, 1.0), batching=batching)
        for padding in (0.1, 0.9)
    ]

    assert rates[0] > 1.2 * rates[1] > 0
    assert {longest for _, longest in seen} >= {10, 400}
    assert max(size for size, _ in seen) > 1
