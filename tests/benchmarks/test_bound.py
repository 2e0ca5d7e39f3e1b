"""The bound's frames: what it compares with has to do the work."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module under test, which lies in a folder of its own."""
    monkeypatch.syspath_prepend(str(next(path for path in sys.path if path.endswith("benchmarks")) + "/beside"))
    return import_module("bound")


def test_bodies_come_out_of_a_frame_as_they_went_in(bound: Any) -> None:
    """Empty ones too, and what follows the frame is left alone."""
    frame = bound.pack([b"one", b"", b"three"])

    assert bound.unpack(frame + b"next") == ([b"one", b"", b"three"], len(frame))


def test_a_frame_that_is_not_whole_is_waited_for(bound: Any) -> None:
    """At every length that a read may end at."""
    frame = bound.pack([b"one", b"two"])

    assert [bound.unpack(frame[:length]) for length in range(len(frame))] == [None] * len(frame)
