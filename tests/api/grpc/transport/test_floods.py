"""Tests for who floods a connection. Time is passed in."""

from __future__ import annotations

from marserve.api.grpc.transport.floods import (
    CREDIT_PER_S,
    EARNED,
    MOST_CREDIT,
    MOST_EARLY_PINGS,
    Floods,
)


def spent(floods: Floods, now: float) -> int:
    """How many frames without a call pass at once."""
    passed = 0
    while floods.spend(now):
        passed += 1
    return passed


def test_frames_that_carry_no_call_use_up_the_credit() -> None:
    """Time gives some back, and never more than there was."""
    floods = Floods(10.0, 0.0)

    assert spent(floods, 0.0) == MOST_CREDIT
    assert spent(floods, 1.0) == CREDIT_PER_S - 1  # the frame that was one too many counts
    assert spent(floods, 1e6) == MOST_CREDIT


def test_calls_earn_credit() -> None:
    """So that a busy client may update its windows for each answer."""
    floods = Floods(10.0, 0.0)
    spent(floods, 0.0)

    for _ in range(1000):
        floods.earn()
        assert all(floods.spend(0.0) for _ in range(int(EARNED) - 1))


def test_a_client_that_asks_too_often_whether_the_server_is_there_is_found_out() -> None:
    """After as many early pings as are overlooked."""
    floods = Floods(10.0, 0.0)
    answers = [floods.ping(now) for now in (0.0, *(1.0 + number for number in range(MOST_EARLY_PINGS + 1)))]

    assert answers == [True] * (MOST_EARLY_PINGS + 1) + [False]


def test_pings_at_their_interval_or_beside_calls_are_fine() -> None:
    """For ever."""
    quiet, busy = Floods(10.0, 0.0), Floods(10.0, 0.0)

    assert all(quiet.ping(10.0 * number) for number in range(100))
    for number in range(100):
        busy.earn()
        assert busy.ping(number / 100)
