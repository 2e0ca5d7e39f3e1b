"""A model divided over 1, 2 and 4 ranks answers alike, and no rank has more in memory than its share and a little."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="reads RssAnon of /proc"),
]


@pytest.fixture(scope="module")
def sharding() -> Any:
    """The benchmark, which lies in a folder of its own."""
    return import_module("sharding")


@pytest.mark.timeout(600)
def test_ranks_hold_their_share_and_answer_as_one_does(sharding: Any) -> None:
    """From a file, and from 1 rank to 2, 2 to 1, 2 to 4: within 1e-5, at most 1.05 of its share and 128 MiB each."""
    loads = [(0, 1), (0, 2), (1, 2), (2, 1), (2, 4)]
    measured = sharding.measure(512 << 20, loads)

    seen = [(rank.saved_by, rank.ranks, rank.rank) for rank, _ in measured]
    assert seen == [(saved_by, ranks, rank) for saved_by, ranks in loads for rank in range(ranks)]
    for rank, difference in measured:
        assert not rank.differs
        assert difference <= 1e-5
        assert rank.peak_bytes <= 1.05 * rank.share_bytes + (128 << 20), rank
    shares = {rank.ranks: rank.share_bytes for rank, _ in measured}
    assert shares[4] == pytest.approx(shares[1] / 4, rel=0.01)
