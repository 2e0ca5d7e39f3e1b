"""Which failed calls are tried again, and after how long: a pure decision."""

from __future__ import annotations

from typing import get_args

import pytest

from marserve_client.errors import (
    BadAnswer,
    BadInput,
    CallFailed,
    ConnectionLost,
    DeadlinePassed,
    NoConnection,
    Overloaded,
    ServerFailed,
)
from marserve_client.retries import NO_RETRIES, Repeat, Retries, pause_s

RETRIES = Retries(tries=4, first_pause_s=0.1, longest_pause_s=5)


def pause(
    failure: CallFailed,
    repeat: Repeat = "if_refused",
    number: int = 1,
    left_s: float | None = None,
    chance: float = 0,
    retries: Retries = RETRIES,
) -> float | None:
    """The decision."""
    return pause_s(retries, failure, number=number, repeat=repeat, left_s=left_s, chance=chance)


def full(retry_after_s: float | None, cause: str | None = "queue_full") -> Overloaded:
    """A server that is full."""
    return Overloaded("Full.", status=503, retry_after_s=retry_after_s, cause=cause)


@pytest.mark.parametrize("repeat", ["reads", "if_refused", "if_unsent"])
def test_what_was_never_sent_is_sent_again_at_growing_pauses(repeat: Repeat) -> None:
    """Of every kind of call; chance shortens a pause by up to a half, and the longest bounds it."""
    away = NoConnection("No server answers.")

    assert [pause(away, repeat, number) for number in (1, 2, 3, 4)] == [0.1, 0.2, 0.4, None]
    assert pause(away, repeat, chance=1) == 0.05
    assert pause(away, repeat, 3, retries=Retries(9, 4, 5)) == 5


@pytest.mark.parametrize("repeat", get_args(Repeat))
def test_a_refusal_that_says_when_is_obeyed_by_calls_that_may_come_twice(repeat: Repeat) -> None:
    """Exactly as long as it says; calls that must not be made twice are not repeated."""
    assert pause(full(3), repeat, chance=1) == (3 if repeat in ("reads", "if_refused") else None)


@pytest.mark.parametrize(
    "failure",
    [
        full(None),  # a handler's own 503, which ran
        full(5.5),  # longer than the longest pause
        full(1, "refused_fingerprint"),  # the body that killed two workers
        ServerFailed("Worker died.", status=500, retry_after_s=1),
        DeadlinePassed("Too late.", status=504),
        BadInput("No.", status=400),
        BadAnswer("Garbage."),
    ],
)
def test_what_may_have_run_is_final(failure: CallFailed) -> None:
    """Also for calls that only read."""
    assert pause(failure, "reads") is None


def test_a_connection_that_broke_is_tried_again_by_reads_alone() -> None:
    """And never after a byte of an answer."""
    lost = ConnectionLost("It broke.")
    assert pause(lost, "reads") == 0.1
    assert pause(lost, "if_refused") is None

    lost.received_bytes = 1

    assert pause(lost, "reads") is None


def test_no_pause_is_longer_than_the_time_that_is_left() -> None:
    """The error comes at once instead."""
    assert pause(full(3), left_s=3.1) == 3
    assert pause(full(3), left_s=3) is None


def test_retries_can_be_switched_off() -> None:
    """For all calls, and for one kind."""
    assert pause(NoConnection("Away."), "reads", retries=NO_RETRIES) is None
    assert pause(NoConnection("Away."), "once") is None


@pytest.mark.parametrize("arguments", [{"tries": 0}, {"first_pause_s": -1}, {"longest_pause_s": -0.1}])
def test_numbers_that_mean_nothing_are_refused(arguments: dict[str, float]) -> None:
    """With the argument's name."""
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Retries(**arguments)  # type: ignore[arg-type]
