"""When a worker is to be replaced because its handler says that it is not well."""

from __future__ import annotations

from marserve.pool.checks.health import MOST_DOUBLED, STRIKES, HealthView, WorkerHealth


def fails(health: WorkerHealth, times: int) -> list[bool]:
    """What each of these failures comes to."""
    return [health.failed(float(number), f"failure {number}") for number in range(times)]


def test_one_failure_is_forgiven_and_two_in_a_row_are_not() -> None:
    """A success between them begins anew."""
    health = WorkerHealth()

    assert health.view == HealthView("unknown", 0, None, "")
    assert fails(health, 1) == [False]
    health.passed(5.0)
    assert health.view == HealthView("well", 0, 5.0, "")
    assert fails(health, 3) == [False, True, True]
    assert health.view == HealthView("failing", 3, 2.0, "failure 2")


def test_a_replacement_that_was_never_well_is_given_twice_as_long() -> None:
    """What is outside and broken must not have models loaded without end."""
    vain, strikes = 0, []
    for _ in range(MOST_DOUBLED + 3):
        health = WorkerHealth(vain)
        strikes.append(fails(health, 1000).index(True) + 1)
        vain = health.vain_for_heir

    assert strikes[:4] == [STRIKES, 2 * STRIKES, 4 * STRIKES, 8 * STRIKES]
    assert strikes[-2:] == [STRIKES << MOST_DOUBLED] * 2


def test_a_replacement_that_was_well_once_is_judged_as_any() -> None:
    """And so is the one after it."""
    health = WorkerHealth(3)
    fails(health, 1)

    health.passed(1.0)

    assert fails(health, 2) == [False, True]
    assert health.vain_for_heir == 0
    assert WorkerHealth(3).vain_for_heir == 0  # replaced for its age, say, before it was asked
