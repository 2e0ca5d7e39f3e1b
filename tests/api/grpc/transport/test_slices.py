"""Tests for slices of few frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marserve.api.grpc.transport.slices import PREFACE_BYTES, Slices


@given(st.lists(st.integers(0, 40), max_size=12), st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_slices_are_all_that_came_and_have_few_frames_each(lengths: list[int], reads: list[int]) -> None:
    """However the bytes are cut into reads: what is left is given again, with what follows it."""
    frames = [length.to_bytes(3, "big") + b"\0" * 6 + b"x" * length for length in lengths]
    data, slices, waiting, taken, counts = b"P" * PREFACE_BYTES + b"".join(frames), Slices(3), b"", b"", []
    at = 0
    while at < len(data):
        size = reads[len(counts) % len(reads)]
        waiting, at = waiting + data[at : at + size], at + size
        while True:
            end, count = slices.cut(waiting)
            counts.append(count)
            taken, waiting = taken + waiting[:end], waiting[end:]
            if count < 3 or not waiting:
                break

    assert (taken, waiting) == (data, b"")
    assert (sum(counts), max(counts) <= 3) == (len(frames), True)
