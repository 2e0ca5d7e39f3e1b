"""One request from its first byte to its last, as stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.messages import Work
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.timeline import STAGES, BatchTimes, Timeline, seconds_by_stage


def whole() -> Timeline:
    """A request with a batch of one, in which each stage takes another time."""
    timeline = Timeline("a", 101.003, 10)
    timeline.came_in_pieces(100.0, 100.001)
    timeline.admitted_at = 101.01
    batch = BatchTimes("9000/0", 1, 101.11)
    timeline.left_in(batch)
    batch.land(102.0, 0.5, Work(101.13, 0.04, 0.08))
    timeline.end(102.1, 200, 5)
    return timeline


def test_each_stage_is_the_time_between_two_moments() -> None:
    """From the first byte to the last."""
    stages = dict(zip(STAGES, seconds_by_stage(whole()), strict=True))

    assert stages == pytest.approx(
        {
            "header": 0.001,
            "body": 1.002,
            "admit": 0.007,
            "queue": 0.1,
            "send": 0.02,
            "decode": 0.04,
            "handle": 0.5,
            "encode": 0.08,
            "return": 0.25,
            "write": 0.1,
        }
    )


def test_a_request_that_came_with_one_read_has_no_time_for_header_and_body() -> None:
    """Its first byte is when it was read."""
    timeline = Timeline("a", 100.0)
    timeline.end(100.5, 404, 0, "unknown")

    assert seconds_by_stage(timeline) == (0.0, 0.0, 0.5, *[0.0] * 7)


def test_a_header_that_came_slowly_is_not_the_bodys_time() -> None:
    """The body came with the end of the header."""
    timeline = Timeline("a", 105.0)
    timeline.came_in_pieces(100.0, 0.0)
    timeline.end(105.0, 200, 0)

    assert seconds_by_stage(timeline)[:2] == (5.0, 0.0)


def test_a_batch_sent_ahead_waits_in_the_queue_until_its_worker_is_free() -> None:
    """That it lay in the worker's socket already makes no difference to its client."""
    timeline = Timeline("a", 100.0, admitted_at=100.0)
    batch = BatchTimes("9000/0", 1, 100.1, free_at=103.0)
    timeline.left_in(batch)
    batch.land(104.0, 0.9, Work(103.05, 0.0, 0.0))
    timeline.end(104.0, 200, 0)

    stages = dict(zip(STAGES, seconds_by_stage(timeline), strict=True))

    assert stages["queue"] == pytest.approx(3.0)
    assert stages["send"] == pytest.approx(0.05)


def test_a_worker_with_another_clock_leaves_the_way_there_and_back_together() -> None:
    """Only durations are known of it."""
    timeline = Timeline("a", 100.0, admitted_at=100.0)
    batch = BatchTimes("9000/0", 1, 100.0)
    timeline.left_in(batch)
    batch.land(101.0, 0.6, Work(0.0, 0.1, 0.1))
    timeline.end(101.0, 200, 0)

    stages = dict(zip(STAGES, seconds_by_stage(timeline), strict=True))

    assert timeline.has_remote_worker
    assert (stages["send"], stages["return"]) == (pytest.approx(0.2), pytest.approx(0.0))
    assert stages["handle"] == pytest.approx(0.6)


def test_a_request_whose_worker_died_has_the_rest_in_the_handler() -> None:
    """The worker has told nothing."""
    timeline = Timeline("a", 100.0, admitted_at=100.5)
    timeline.left_in(BatchTimes("9000/0", 1, 101.0))
    timeline.end(109.0, 500, 0, "worker_died")

    stages = dict(zip(STAGES, seconds_by_stage(timeline), strict=True))

    assert stages["queue"] == pytest.approx(0.5)
    assert stages["handle"] == pytest.approx(8.0)
    assert timeline.has_failed


def test_a_request_that_ran_twice_has_all_between_in_the_handler() -> None:
    """The queue is what it waited for the first worker."""
    timeline = Timeline("a", 100.0, admitted_at=100.0)
    first, last = BatchTimes("9000/0", 2, 101.0), BatchTimes("9001/0", 1, 105.0)
    for batch in (first, last):
        timeline.left_in(batch)
    last.land(107.0, 1.5, Work(105.1, 0.1, 0.1))
    timeline.end(107.0, 200, 0)

    stages = dict(zip(STAGES, seconds_by_stage(timeline), strict=True))

    assert (timeline.runs, stages["queue"]) == (2, pytest.approx(1.0))
    assert stages["handle"] == pytest.approx(5.7)


@pytest.mark.parametrize(
    ("status", "error", "has_failed"),
    [
        (200, "", False),
        (400, "", False),
        (499, "client_gone", False),
        (503, "queue_full", True),
        (200, "handler", True),
    ],
)
def test_a_clients_mistake_is_no_failure(status: int, error: str, has_failed: bool) -> None:
    """A stream that broke off is one, whatever its status was."""
    assert Timeline("a", 1.0, status=status, error=error).has_failed == has_failed


moments = st.floats(0.0, 1e6)
seconds = st.floats(0.0, 1e6)
works = st.builds(Work, moments, seconds, seconds)
batches = st.builds(
    BatchTimes,
    st.just("9000/0"),
    st.integers(1, 9),
    moments,
    st.booleans(),
    moments,
    moments,
    seconds,
    st.none() | works,
)


@given(moments, moments, moments, moments, st.none() | batches, st.none() | batches, moments)
def test_stages_add_up_to_the_whole_whatever_a_worker_says(
    began: float,
    head_at: float,
    body_at: float,
    admitted_at: float,
    first: BatchTimes | None,
    last: BatchTimes | None,
    written_at: float,
) -> None:
    """None is negative, and clocks may do what they want."""
    timeline = Timeline(
        "a", began, head_at=head_at, body_at=body_at, admitted_at=admitted_at, first=first, last=last or first
    )
    timeline.end(written_at, 200, 0)

    stages = seconds_by_stage(timeline)

    assert len(stages) == len(STAGES)
    assert min(stages) >= 0.0
    assert sum(stages) == pytest.approx(timeline.wall_s)


def test_a_batch_is_counted_once_for_each_of_its_requests() -> None:
    """The worker's stages are those of all its members."""
    stages = StageSeconds("m", "1", (0.01, 0.1, 1.0))
    batch = BatchTimes("9000/0", 4, 100.0)
    batch.land(101.0, 0.5, Work(100.05, 0.2, 0.05))

    stages.observe_batch(batch)

    assert {stage: (each.count, round(each.sum / 4, 6)) for stage, each in stages.by_stage.items()} == {
        "send": (4, 0.05),
        "return": (4, 0.2),
        "decode": (4, 0.2),
        "encode": (4, 0.05),
    }


def test_the_stages_of_single_requests_are_counted_when_they_have_ended() -> None:
    """Those without time for header and body are not among these."""
    stages = StageSeconds("m", "1", (0.01, 0.1, 1.0))
    plain = Timeline("b", 100.0, admitted_at=100.5)
    plain.end(101.0, 503, 0, "queue_full")

    stages.observe_ended([whole(), plain])

    assert {stage: (each.count, round(each.sum, 6)) for stage, each in stages.by_stage.items()} == {
        "header": (1, 0.001),
        "body": (1, 1.002),
        "admit": (2, 0.507),
        "write": (1, 0.1),
    }
