"""The flight recorder."""

from __future__ import annotations

import tracemalloc

import pytest

from marserve.messages import Span, Work
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.recorder import (
    BEGUN_TOGETHER,
    FAILED_KEPT,
    LATEST,
    LEAST_RECORDS,
    RING_BURST,
    SLOWEST_FOR_S,
    SLOWEST_KEPT,
    SORTED_TOGETHER,
    Recorder,
    of_id,
)
from marserve.telemetry.timeline import BatchTimes, Timeline

M, OTHER = (StageSeconds(name, "1", (0.1, 1.0)) for name in ("m", "other"))


def ended(
    name: str,
    at: float,
    wall_s: float = 0.01,
    status: int = 200,
    error: str = "",
    *,
    of: StageSeconds = M,
    batch: BatchTimes | None = None,
) -> Timeline:
    """A request that has ended at this time."""
    timeline = Timeline(name, at - wall_s, admitted_at=at - wall_s, of=of)
    if batch is not None:
        timeline.left_in(batch)
    timeline.end(at, status, 0, error)
    return timeline


def test_a_request_is_known_as_soon_as_it_has_ended() -> None:
    """By its id, or the client's."""
    recorder = Recorder(1 << 20)
    timeline = ended("a", 1.0)
    timeline.client_id = "theirs"

    recorder.take(timeline)

    assert of_id("a", recorder) == [timeline]
    assert of_id("theirs", recorder) == [timeline]
    assert of_id("b", recorder) == []


def test_of_equal_ids_the_newest_comes_first() -> None:
    """A client need not make its ids unique."""
    recorder = Recorder(1 << 20)
    for at in range(3):
        recorder.take(ended("same", float(at)))

    assert [each.written_at for each in of_id("same", recorder)] == [2.0, 1.0, 0.0]


def test_all_requests_are_kept_while_they_are_few() -> None:
    """A thousand a second go into the ring."""
    recorder = Recorder(8 << 20)
    for number in range(5000):
        recorder.take(ended(str(number), number / 900))

    assert len(list(recorder)) == 5000


def test_of_very_many_the_unusual_ones_are_kept() -> None:
    """Usual ones are a sample, and the very last ones all of them."""
    recorder = Recorder(8 << 20)
    for number in range(60_000):
        recorder.take(ended(str(number), number / 20_000, 0.01 if number % 500 else 0.05))

    known = list(recorder)
    assert sum(each.wall_s > 0.04 for each in known) > 110
    assert len(known) < RING_BURST + 3 * 1000 + LATEST + SORTED_TOGETHER + 500
    assert {str(number) for number in range(60_000 - LATEST, 60_000)} <= {each.id for each in known}


def test_timelines_are_begun_for_so_many_in_a_tenth_of_a_second() -> None:
    """A server that answers tens of thousands a second must not slow down by it."""
    recorder = Recorder(1 << 20)

    assert sum(recorder.begins(10.0 + number / 10_000) for number in range(999)) == BEGUN_TOGETHER
    assert recorder.begins(10.1)


def test_a_request_without_a_timeline_is_known_if_it_was_slow_or_has_failed() -> None:
    """It is made at its end, so it is in no histogram: others like it are not."""
    of = StageSeconds("late", "1", (0.1, 1.0))
    recorder = Recorder(1 << 20)
    recorder.take_late(ended("late", 10.0, 5.0, of=of))

    assert [each.id for each in recorder] == ["late"]
    assert of.by_stage == {}


def test_what_is_slow_is_learned_from_others() -> None:
    """Twice their mean."""
    recorder = Recorder(1 << 20)
    for number in range(SORTED_TOGETHER):
        recorder.take(ended(str(number), 10.0 + number, 0.25))

    assert recorder.slow_above_s == pytest.approx(0.5)


def test_each_version_has_its_own_idea_of_slow() -> None:
    """So that requests of a slow model do not count as unusual beside those of a quick one."""
    recorder, quick, slow = Recorder(1 << 20), StageSeconds("q", "1", (0.1,)), StageSeconds("s", "1", (0.1,))
    for number in range(10 * SORTED_TOGETHER):
        is_slow = number % SORTED_TOGETHER == 0  # one among many: too few for a mean of its own
        recorder.take(ended(str(number), 10.0 + number, 5.0 if is_slow else 0.25, of=slow if is_slow else quick))

    assert quick.slow_above_s == pytest.approx(0.5)
    assert slow.slow_above_s == pytest.approx(10.0)
    assert recorder.slow_above_s == pytest.approx(0.5)
    recorder.take_late(ended("late", 1000.0, 400.0, of=quick))
    assert quick.slow_above_s == pytest.approx(0.5)


def test_spans_of_what_is_kept_longer_are_bounded() -> None:
    """Whether or not the requests are in the ring, too."""
    recorder = Recorder(0)
    works = []
    for number in range(3 * int(RING_BURST)):  # the ring takes no more in this second
        recorder.take_late(ended(str(number), 2.0, status=500, error="handler"))
    for number in range(4 * LEAST_RECORDS):
        of = StageSeconds(f"m-{number}", "1", (0.1,))
        batch = BatchTimes("9000/0", 1, 1.0)
        batch.land(2.0, 0.5, Work(1.0, 0.0, 0.0, spans=[Span("a", 0.0, 0.1)] * 32))
        works.append(batch.work)
        timeline = Timeline(f"r-{number}", 1.0, of=of)
        timeline.left_in(batch)
        timeline.end(2.0, 500, 0, "handler")
        recorder.take_late(timeline)
    recorder.sort()

    assert sum(len(work.spans) for work in works if work is not None) <= LEAST_RECORDS


def test_the_slowest_and_the_failed_of_each_model_outlive_the_ring() -> None:
    """So that one slow request of the morning is there at noon."""
    recorder = Recorder(0)
    recorder.take(ended("slow", 1.0, 5.0, of=OTHER))
    recorder.take(ended("failed", 2.0, status=500, error="handler"))
    for number in range(20_000):
        recorder.take(ended(str(number), 2.0 + number / 10_000))

    assert of_id("slow", recorder)
    assert of_id("failed", recorder)


def test_of_a_model_a_fixed_number_is_kept() -> None:
    """The slowest, and the latest failed ones."""
    recorder = Recorder(0)
    for number in range(1000):
        recorder.take(ended(f"s{number}", number / 10, number / 100))
        recorder.take(ended(f"f{number}", number / 10, status=500, error="handler"))
    for number in range(20_000):
        recorder.take(ended(str(number), 200 + number / 10_000))

    known = {each.id for each in recorder}
    assert {f"s{number}" for number in range(1000 - SLOWEST_KEPT, 1000)} <= known
    assert {f"f{number}" for number in range(1000 - FAILED_KEPT, 1000)} <= known
    assert sum(name.startswith("s") for name in known) == SLOWEST_KEPT
    assert sum(name.startswith("f") for name in known) == FAILED_KEPT


def test_after_an_hour_the_slowest_are_those_since_then() -> None:
    """One terrible minute must not hide all that comes after it."""
    recorder = Recorder(0)
    for number in range(SLOWEST_KEPT):
        recorder.take(ended(f"old{number}", 1.0, 100.0))
    later = 1.0 + SLOWEST_FOR_S + 1
    recorder.take(ended("new", later, 1.0))
    for number in range(20_000):
        recorder.take(ended(str(number), later + number / 10_000))

    assert of_id("new", recorder)
    assert not of_id("old0", recorder)


def test_a_clients_mistake_is_not_kept_as_a_failure() -> None:
    """A flood of bad requests must not drive the failures out."""
    recorder = Recorder(0)
    recorder.take(ended("failed", 1.0, status=500, error="handler"))
    for number in range(5000):
        recorder.take(ended(f"bad{number}", 1.0 + number / 1000, status=400, error="malformed"))

    assert of_id("failed", recorder)


def test_models_that_were_not_slow_for_long_leave_for_others() -> None:
    """The number of models does not make it grow."""
    recorder = Recorder(1 << 20)
    for number in range(1000):
        of = StageSeconds(f"m{number}", "1", (0.1,))
        for repeat in range(40):
            recorder.take(ended(f"{number}/{repeat}", number * 10.0 + repeat, of=of, status=500, error="handler"))

    assert len(list(recorder)) < recorder.capacity + (1 << 20) // 8 // 1024 + LATEST + 100


def test_memory_stays_within_the_limit() -> None:
    """With ids of a client's greatest length, batches of one, and spans."""
    limit = 4 << 20
    recorder = Recorder(limit)
    tracemalloc.start()
    try:
        for number in range(12_000):
            at = number / 500
            batch = BatchTimes("9000/0", 1, at)
            spans = [Span(f"span {place:50} {number}", 0.001 * place, 0.1) for place in range(32)] if number % 5 else []
            batch.land(at + 0.5, 0.1 * number, Work(at + 0.1, 0.001, 0.002 * number, spans=spans))
            timeline = ended(f"{number:064}", at + 1, batch=batch)
            timeline.client_id = f"{number:0128}"
            timeline.first_piece_at = at + 0.6
            recorder.take(timeline)
        del batch, spans, timeline
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

    assert used < limit + (2 << 20)  # the latest few hundred have their spans beside that
    assert sum(1 for _ in recorder) > recorder.capacity / 2


def test_requests_of_several_versions_are_counted_each_in_its_own() -> None:
    """They end in any order."""
    one, two = StageSeconds("m", "1", (0.1, 1.0)), StageSeconds("m", "2", (0.1, 1.0))
    recorder = Recorder(1 << 20)
    for number in range(SORTED_TOGETHER):
        recorder.take(ended(str(number), 1.0, of=one if number % 4 else two))

    assert (one.by_stage["admit"].count, two.by_stage["admit"].count) == (48, 16)


def test_a_request_that_no_model_took_is_known_too() -> None:
    """As one for a model that is not there."""
    recorder = Recorder(1 << 20)
    timeline = Timeline("lost", 1.0)
    timeline.end(1.1, 404, 0, "error")

    recorder.take(timeline)

    assert of_id("lost", recorder)[0].model == ""


@pytest.mark.parametrize("limit", [0, 1, 1 << 30])
def test_any_limit_makes_a_recorder(limit: int) -> None:
    """The least one knows a few."""
    recorder = Recorder(limit)
    recorder.take(ended("a", 1.0))

    assert [each.id for each in recorder] == ["a"]
