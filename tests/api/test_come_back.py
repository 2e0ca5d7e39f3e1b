"""Tests for the seconds that refused clients are told."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from marserve.api.come_back import come_back_in
from marserve.api.errors import error_headers
from marserve.api.grpc.errors import grpc_status
from marserve.errors import QueueFull


@pytest.mark.parametrize(
    ("earliest_s", "least", "most"), [(0.0, 1, 3), (0.25, 1, 3), (2.1, 3, 5), (10.0, 10, 15), (300.0, 300, 360)]
)
def test_clients_are_told_each_second_from_the_known_moment_to_half_as_much_more(
    earliest_s: float, least: int, most: int
) -> None:
    """Never one before it, never one beyond the bound, and about as many each."""
    dice = random.Random(7)
    told = Counter(come_back_in(earliest_s, dice) for _ in range(200 * (most - least + 1)))

    assert (min(told), max(told), len(told)) == (least, most, most - least + 1)
    assert max(told.values()) < 2 * min(told.values()) or len(told) > 10


def test_the_same_seed_tells_the_same_seconds() -> None:
    """So that a run can be played again."""
    one, other = random.Random(3), random.Random(3)

    assert [come_back_in(20.0, one) for _ in range(9)] == [come_back_in(20.0, other) for _ in range(9)]


def test_who_has_a_moment_of_its_own_is_told_that_or_the_next_second() -> None:
    """By HTTP and by gRPC: the seconds around it are others'."""
    error = QueueFull("m", retry_after_s=20.0)
    error.retry_spread_s = 1

    assert {dict(error_headers(error))["retry-after"] for _ in range(60)} == {"20", "21"}
    assert {dict(grpc_status(error).trailers)["retry-after"] for _ in range(60)} == {"20", "21"}


def test_refusals_of_one_moment_are_told_different_seconds_by_http_and_grpc() -> None:
    """One client hears one time, whichever word it reads."""
    error = QueueFull("m", retry_after_s=7.0)
    of_http = {dict(error_headers(error))["retry-after"] for _ in range(60)}
    trailers = [dict(grpc_status(error).trailers) for _ in range(60)]

    assert of_http <= {"7", "8", "9", "10"}
    assert len(of_http) > 1
    assert len({one["retry-after"] for one in trailers}) > 1
    assert all(one["grpc-retry-pushback-ms"] == f"{one['retry-after']}000" for one in trailers)
