"""The stages of a version that is gone are counted no more."""

from __future__ import annotations

from marserve.messages import Work
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.timeline import BatchTimes, Timeline


def test_a_version_that_is_gone_leaves_no_histogram_to_the_timelines_that_are_kept_of_it() -> None:
    """Nor do requests that end later, or are sorted later, give it new ones."""
    of = StageSeconds("m", "1.0", (0.1,))
    batch = BatchTimes("9000/0", 1, 1.0, landed_at=2.0, work=Work(0.1, 0.1, 0.1), of=of)
    ended = Timeline("id", 0.5, admitted_at=0.6, of=of, first=batch, last=batch, written_at=2.1)
    of.observe_batch(batch)
    of.observe_ended([ended])
    assert set(of.by_stage) == {"send", "decode", "encode", "return", "admit", "write"}

    of.end()
    of.observe_batch(batch)
    of.observe_ended([ended])
    of.observe("first_chunk", 0.1)

    assert of.by_stage == {}
    assert (ended.model, ended.version) == ("m", "1.0")
