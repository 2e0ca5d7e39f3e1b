"""What the C library keeps of freed memory: asked of a process of its own, since the setting stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from marserve.allocator import BY_SERVER, BY_WORKER, Kept

MIB = 1024 * 1024
FAULTS = """
import resource, sys
from marserve.allocator import Kept, keep_large_blocks

block_bytes, free_bytes, size = map(int, sys.argv[1:])
keep_large_blocks(Kept(block_bytes, free_bytes))
bytearray(size)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    bytearray(size)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of(kept: Kept, size: int) -> int:
    """How many pages a process has to be given anew for five blocks of `size`, one after the other."""
    command = [sys.executable, "-c", FAULTS, str(kept.block_bytes), str(kept.free_bytes), str(size)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_blocks_up_to_the_bound_are_used_again_and_larger_ones_go_back() -> None:
    """A worker keeps what networks make again and again; of a very large body neither process keeps anything."""
    nothing = Kept(1 * MIB, 1 * MIB)
    given_back = faults_of(nothing, 2 * MIB)
    if not given_back:
        pytest.skip("this C library does not give large blocks back")

    assert faults_of(BY_SERVER, 2 * MIB) < given_back / 5
    assert faults_of(BY_WORKER, 20 * MIB) < faults_of(nothing, 20 * MIB) / 5
    assert faults_of(BY_SERVER, 8 * MIB) > faults_of(nothing, 8 * MIB) / 2
    assert faults_of(BY_WORKER, 40 * MIB) > faults_of(nothing, 40 * MIB) / 2
