"""Tests for the response limit: from when it runs, when the next look is due, and what is said of a worker past it."""

from __future__ import annotations

import pytest

from marserve.pool.dispatch.jobs import Flight
from marserve.pool.slots.response_limit import ResponseLimit
from marserve.pool.worker_end.cause_of_death import Cause, Death
from marserve.shared_page import Page

LIMIT_S = 10.0
SENT = Flight(3, [], False, 100.0)


class ShownPage:
    """What a worker shows: the batch it runs, since when, and the last one it has ended."""

    def __init__(self, number: int = 0, began: float = 0.0, finished: int = 0) -> None:
        self.running = (number, began)
        self.finished = finished


@pytest.fixture
def limit() -> ResponseLimit:
    """The limit of one worker."""
    return ResponseLimit(LIMIT_S)


def look(
    limit: ResponseLimit, now: float, page: ShownPage, *, quiet_since: float | None = None, is_asked: bool = False
) -> float | Death:
    """One look at a worker without processes, whose oldest batch is number 3."""
    return limit.look(now, SENT, page, [], quiet_since=quiet_since, is_asked=is_asked)  # type: ignore[arg-type]


def test_the_limit_runs_from_the_begin_that_the_page_shows(limit: ResponseLimit) -> None:
    """The worker is looked at a second before it, and at it; then it is past."""
    page = ShownPage(3, 105.0)

    assert look(limit, 106.0, page) == 114.0
    assert look(limit, 114.0, page) == 115.0
    found = look(limit, 115.0, page)

    assert isinstance(found, Death)
    assert found.cause is Cause.RESPONSE_TIMEOUT
    assert found.detail == "no answer within responseTimeout, 10 s"


@pytest.mark.parametrize("page", [ShownPage(2, 105.0), ShownPage(3, 99.0), ShownPage(3, 109.5)])
def test_a_page_without_a_possible_begin_counts_from_the_sending(limit: ResponseLimit, page: ShownPage) -> None:
    """A batch before this one, a time before the sending, a time that has not come."""
    assert look(limit, 109.0, page) == 110.0
    assert isinstance(look(limit, 110.0, ShownPage(2, 0.0)), Death)


def test_what_the_worker_sends_begins_the_limit_anew(limit: ResponseLimit) -> None:
    """A piece of a stream, or the answer to the batch before."""
    limit.heard_at = 108.0

    assert look(limit, 110.0, ShownPage(3, 100.0)) == 117.0


def test_an_answer_that_is_not_read_yet_gets_the_limit_once_more(limit: ResponseLimit) -> None:
    """The worker has ended the batch; it is awaited once, and not again."""
    page = ShownPage(3, 100.0, finished=3)

    assert look(limit, 110.0, page) == 120.0
    assert isinstance(look(limit, 120.0, page), Death)


def test_a_worker_that_is_not_read_is_not_late(limit: ResponseLimit) -> None:
    """A slow client holds it; the limit begins when it is read again."""
    limit.is_held = True
    assert look(limit, 150.0, ShownPage(3, 100.0)) == 160.0
    limit.is_held = False

    assert look(limit, 151.0, ShownPage(3, 100.0)) == 159.0


def test_a_worker_of_many_batches_is_late_when_one_of_them_is_quiet(limit: ResponseLimit) -> None:
    """The time of the quietest one counts, whatever the page shows."""
    page = ShownPage(3, 149.0)

    assert look(limit, 109.0, page, quiet_since=100.0) == 110.0
    found = look(limit, 110.0, page, quiet_since=100.0)

    assert isinstance(found, Death)
    assert found.detail == "no answer to one of its requests in responseTimeout, 10 s"


def test_the_time_in_which_a_worker_of_many_was_not_read_does_not_count(limit: ResponseLimit) -> None:
    """It waited for a slow client."""
    limit.resumed_at = 105.0

    assert look(limit, 110.0, ShownPage(3, 100.0), quiet_since=100.0) == 115.0
    assert isinstance(look(limit, 115.0, ShownPage(3, 100.0), quiet_since=100.0), Death)


@pytest.mark.parametrize(("number", "says_so"), [(2, True), (3, False)])
def test_a_worker_that_was_asked_for_lengths_is_said_to_be_at_that(
    limit: ResponseLimit, number: int, says_so: bool
) -> None:
    """Only until it has begun the batch that follows the question."""
    found = look(limit, 200.0, ShownPage(number, 100.0), is_asked=True)

    assert isinstance(found, Death)
    assert ("length_of was asked" in found.detail) is says_so


def test_a_page_is_what_a_look_reads() -> None:
    """The names that `ShownPage` has are those of the shared page."""
    assert hasattr(Page, "running")
    assert hasattr(Page, "finished")
