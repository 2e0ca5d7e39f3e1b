"""A model filled from a checkpoint answers alike in every way, and no process has more than its share and a little."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="reads RssAnon of /proc"),
]


@pytest.mark.timeout(600)
def test_every_way_of_loading_keeps_to_its_share() -> None:
    """1 to 2, 2 to 1, 2 to 4: within 1e-5, at most 1.05 of the share and 128 MiB, and each byte is read once."""
    checkpoints = import_module("checkpoints")

    measured = checkpoints.measure(512 << 20)

    assert {each.case for each, _ in measured} == set(checkpoints.CASES)
    for each, difference in measured:
        assert difference <= 1e-5
        assert each.peak_bytes <= each.most_bytes, each
    for case in checkpoints.CASES:
        of_case = [each for each, _ in measured if each.case == case]
        assert sum(each.read_bytes for each in of_case) <= checkpoints.most_read(of_case)
    mapped = measured[0][0]
    assert mapped.mapped_bytes == mapped.share_bytes
