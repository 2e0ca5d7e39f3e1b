"""Pauses of the server's own garbage collector."""

from __future__ import annotations

import gc

import pytest

from marserve.telemetry import collector_pauses
from marserve.telemetry.collector_pauses import CollectorPauses
from marserve.telemetry.happenings import Happenings


def test_a_long_pause_is_kept_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the begin of the collection to its end."""
    times = iter((100.0, 100.004, 200.0, 200.006))
    monkeypatch.setattr(collector_pauses, "monotonic", lambda: next(times))
    happenings = Happenings()
    pauses = CollectorPauses(happenings)
    gc.disable()
    pauses.begin()
    try:
        gc.collect(0)
        gc.collect(2)
    finally:
        pauses.end()
        gc.enable()

    (kept,) = happenings
    assert (kept.kind, kept.began, kept.ended, kept.model) == ("collection", 200.0, 200.006, "")
    assert kept.text == "the server collected garbage of generation 2"
    assert pauses._on_collection not in gc.callbacks
