"""Tests for when a worker has served long enough."""

from __future__ import annotations

import pytest

from marserve.pool.sizing.recycling import RecyclePolicy


@pytest.mark.parametrize(
    ("requests", "age_s", "growth_bytes", "reason"),
    [
        (999, 59.9, 1000, None),
        (1000, 0.0, 0, "requests"),
        (0, 60.0, 0, "age"),
        (0, 0.0, 1001, "growth"),
        (5000, 100.0, 5000, "requests"),
        (0, 0.0, -1_000_000, None),
    ],
)
def test_a_worker_goes_at_the_first_bound_it_reaches(
    requests: int, age_s: float, growth_bytes: int, reason: str | None
) -> None:
    """Requests, age, growth; not before."""
    policy = RecyclePolicy(max_requests=1000, max_age_s=60.0, max_growth_bytes=1000)

    assert policy.reason(requests=requests, age_s=age_s, growth_bytes=growth_bytes) == reason


def test_without_bounds_a_worker_stays() -> None:
    """And nobody need look."""
    policy = RecyclePolicy()

    assert policy.reason(requests=10**12, age_s=1e12, growth_bytes=10**15) is None
    assert not policy.needs_looks
    assert not RecyclePolicy(max_requests=5).needs_looks
    assert RecyclePolicy(max_age_s=5).needs_looks
    assert RecyclePolicy(max_growth_bytes=5).needs_looks
