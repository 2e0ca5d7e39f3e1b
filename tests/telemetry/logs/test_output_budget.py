"""What a model log takes of workers: which worker is cut, and how much of the event loop's time goes into it."""

from __future__ import annotations

import heapq

import pytest

from marserve.telemetry.logs.output_budget import (
    CUT_S,
    ERROR_BURST_BYTES,
    HEAD_BYTES,
    LOOP_BURST_S,
    LOOP_SHARE,
    OWN_BURST_BYTES,
    OWN_BYTES_PER_S,
    OWN_LOOP_BURST_S,
    OWN_LOOP_SHARE,
    SHARED_BURST_BYTES,
    SHARED_BYTES_PER_S,
    TRACEBACK_BURST_BYTES,
    TURN_S,
    Allowance,
    OutputBudget,
)

LINES, SIZE = 256, 512
COST = LINES * HEAD_BYTES + SIZE


def flood(allowance: Allowance, now: float) -> int:
    """Print until the worker is cut: the cost of what was taken."""
    taken = 0
    while allowance.admit(now, LINES, SIZE):
        taken += COST
    return taken


def test_a_flood_is_taken_up_to_both_allowances() -> None:
    """What a verbose start prints fits in; what never ends does not."""
    taken = flood(OutputBudget().allowance(), 10.0)

    assert SHARED_BURST_BYTES + OWN_BURST_BYTES - 2 * COST < taken <= SHARED_BURST_BYTES + OWN_BURST_BYTES


def test_a_worker_that_is_cut_stays_cut_until_the_count_is_logged() -> None:
    """So that there is one line about it a second, and not one for each read."""
    budget = OutputBudget()
    allowance = budget.allowance()
    flood(allowance, 10.0)
    allowance.leave_out(7, 70)
    allowance.leave_out(3, 30)

    assert allowance.cut_until == 10.0 + CUT_S
    assert not allowance.admit(1000.0, 1, 1)
    assert allowance.end_cut() == (10, 100)
    assert allowance.end_cut() == (0, 0)
    assert allowance.admit(1000.0, 1, 1)
    assert budget.left_out == 10


def test_a_worker_that_prints_little_is_not_cut_because_of_others() -> None:
    """Each worker has an allowance that the others cannot use up."""
    budget = OutputBudget()
    loud, quiet = budget.allowance(), budget.allowance()
    flood(loud, 10.0)

    for second in range(100):
        assert quiet.admit(10.0 + second / 100, 10, 1000)


def test_a_long_flood_is_taken_at_the_rates() -> None:
    """Bytes of log a second, whatever the worker prints."""
    allowance = OutputBudget().allowance()
    flood(allowance, 0.0)
    taken = 0

    for second in range(1, 101):
        allowance.end_cut()
        taken += flood(allowance, float(second))

    assert taken <= 100 * (SHARED_BYTES_PER_S + OWN_BYTES_PER_S)
    assert taken > 99 * (SHARED_BYTES_PER_S + OWN_BYTES_PER_S) - 200 * COST


def test_errors_pass_a_cut_up_to_a_bound() -> None:
    """They are what is looked for in the log of a worker that floods it."""
    allowance = OutputBudget().allowance()
    flood(allowance, 10.0)

    passed = 0
    while allowance.admit_error(10.0, 412):
        passed += 1

    assert passed == ERROR_BURST_BYTES // (412 + HEAD_BYTES)
    assert allowance.admit_error(11.0, 412)


def test_tracebacks_have_a_bound_of_their_own() -> None:
    """A client that makes a handler fail causes them."""
    allowance = OutputBudget().allowance()
    flood(allowance, 10.0)

    passed = 0
    while allowance.admit_traceback(10.0, 4096):
        passed += 1

    assert passed == TRACEBACK_BURST_BYTES // 4096


def test_a_lone_cheap_pipe_is_read_every_few_milliseconds() -> None:
    """However little it has to say: a read for each line of two bytes would take all of the loop's time."""
    budget = OutputBudget()

    assert budget.turns().next(10.0, 0.000_001) == pytest.approx(10.0 + TURN_S)


@pytest.mark.parametrize(("pipes", "spent_s"), [(1, 0.000_5), (1, 0.05), (20, 0.000_5), (500, 0.000_2), (500, 0.005)])
def test_all_pipes_together_take_a_share_of_the_loops_time(pipes: int, spent_s: float) -> None:
    """Each pipe has always more to read; their turns come round, and what they spend in ten seconds is bounded."""
    budget = OutputBudget()
    now, spent = 0.0, 0.0
    each = [budget.turns() for _ in range(pipes)]
    turns = [(0.0, pipe) for pipe in range(pipes)]
    counts = [0] * pipes
    while turns[0][0] < 10.0 and now < 10.0:
        at, pipe = heapq.heappop(turns)
        now = max(now, at) + spent_s
        spent += spent_s
        counts[pipe] += 1
        heapq.heappush(turns, (each[pipe].next(now, spent_s), pipe))

    # The first turn of each pipe comes when it prints: nothing is known of it before.
    own_s = pipes * (10.0 + OWN_LOOP_BURST_S) * OWN_LOOP_SHARE
    assert spent <= (10.0 + LOOP_BURST_S) * LOOP_SHARE + own_s + (pipes + 1) * spent_s
    assert max(counts) - min(counts) <= 2 + OWN_LOOP_BURST_S * OWN_LOOP_SHARE / spent_s


def test_a_pipe_that_is_read_at_little_cost_does_not_wait_for_others() -> None:
    """Lines of a quiet worker are in the log at once, however many others flood it."""
    budget = OutputBudget()
    loud, quiet = [budget.turns() for _ in range(50)], budget.turns()

    for tenth in range(0, 1000, 5):
        now = tenth / 10
        assert max(turns.next(now, 0.005) for turns in loud) > now + 4.0
        assert quiet.next(now, 0.000_05) == pytest.approx(now + TURN_S)
