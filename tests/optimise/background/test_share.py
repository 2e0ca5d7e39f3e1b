"""A budget of processor time: when a family of processes has to pause, and for how long."""

from __future__ import annotations

import random

from marserve.optimise.background.share import Share


def test_what_is_used_beyond_the_share_is_paused_for() -> None:
    """A tenth of a second at a quarter of a core is paid for by four tenths, counted from its begin."""
    share = Share(0.25, now=100.0, used_s=7.0)

    assert share.debt_s(100.0, 7.0) == 0
    assert abs(share.debt_s(100.1, 7.1) - 0.3) < 1e-9
    assert share.debt_s(100.4, 7.1) <= 1e-9


def test_what_was_not_used_is_not_saved_for_a_burst() -> None:
    """After an hour of waiting it pauses as soon as at the begin."""
    share = Share(0.5, now=0.0)

    share.forgive(3600.0, 0.1)

    assert abs(share.debt_s(3600.2, 0.3) - 0.2) < 1e-9


def test_a_debt_is_never_forgiven() -> None:
    """`forgive` is called at each look."""
    share = Share(0.25, now=0.0)

    share.forgive(1.0, 1.0)

    assert share.debt_s(1.0, 1.0) == 3.0


def test_whatever_the_bursts_are_the_whole_keeps_to_the_share() -> None:
    """Played by a clock: bursts of one to four cores between looks, and stops while there is a debt."""
    generator = random.Random(5)
    for part in (0.1, 0.25, 1.0, 1.5):
        now = used = 0.0
        share = Share(part, now)
        is_stopped = False
        while now < 600:
            step = generator.uniform(0.05, 0.2)
            now += step
            used += 0.0 if is_stopped else step * generator.choice([0.5, 1, 2, 4])
            is_stopped = share.debt_s(now, used) > 0
            share.forgive(now, used)
        assert used / now <= part * 1.01 + 0.01
