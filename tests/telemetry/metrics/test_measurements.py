"""What events and counts say of TorchServe's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from marserve.telemetry.metrics.measurements import (
    ONCE,
    ClassCounts,
    Event,
    Measurement,
    RequestCounts,
    Tap,
    measurements_of,
)


def said_by(events: list[Event]) -> list[Measurement]:
    """Everything that follows from these events."""
    return [measurement for event in events for measurement in event.measurements()]


def test_requests_that_leave_the_queue_say_their_times() -> None:
    """Whole milliseconds for the gauge; microseconds for the sum."""
    events: list[Event] = []
    Tap("m", "2.0", events.append).queued([0.0012, 0.0015, 0.004], [0.004])

    said = said_by(events)

    assert said == [
        Measurement("QueueTime", ("Host",), [1.0, 1.0, 4.0]),
        Measurement("ts_queue_latency_microseconds", ("m", "2.0"), [4000.0]),
        Measurement("ts_queue_latency_microseconds", ("m", "default"), [1200.0, 1500.0]),
    ]


def test_answers_say_their_latency_once_each() -> None:
    """Two requests of one and the same latency, one of which named its version, are two."""
    events: list[Event] = []
    Tap("m", "2.0", events.append).answered([0.5, 0.5], [0.5])

    assert said_by(events) == [
        Measurement("ts_inference_latency_microseconds", ("m", "2.0"), [500_000.0]),
        Measurement("ts_inference_latency_microseconds", ("m", "default"), [500_000.0]),
    ]


def test_a_batch_says_the_handlers_and_the_servers_time() -> None:
    """Once a batch, with the ids of all its requests; a clock's jitter makes no negative time."""
    events: list[Event] = []
    Tap("m", "1", events.append).ran(["a", "b"], 0.012341, -0.0001)

    assert said_by(events) == [
        Measurement("WorkerThreadTime", ("Host",), [0.0]),
        Measurement("PredictionTime", ("m", "Model"), [12.34], request_ids="a,b"),
    ]


def test_many_events_say_the_same_as_each_alone() -> None:
    """Those of one series come together."""
    events: list[Event] = []
    for version in ("1", "2"):
        tap = Tap("m", version, events.append)
        for named_s in ([], [0.25]):
            tap.queued([0.25, 0.5], named_s)
            tap.ran(["a", "b"], 0.125, 0.0025)
            tap.answered([1.5, 0.25], named_s)
        tap.loaded("W", 1.0)

    def spread(measurements: Iterable[Measurement]) -> Counter[tuple[str, tuple[str, ...], float, str]]:
        return Counter(
            (each.name, each.values, amount, each.request_ids) for each in measurements for amount in each.amounts
        )

    together = list(measurements_of(events))

    assert spread(together) == spread(said_by(events))
    assert len(together) < len(said_by(events))


def test_nothing_is_said_of_nobody() -> None:
    """A batch all of whose clients have left, and a check, which is nobody's request."""
    events: list[Event] = []
    tap = Tap("m", "1", events.append)

    tap.answered([], [])
    tap.ran([], 0.1, 0.0)

    assert events == []


def test_a_worker_says_how_long_it_took_to_load() -> None:
    """Under its name in the logs."""
    events: list[Event] = []
    Tap("m", "1", events.append).loaded("W-9000-m_1", 4.5931)

    assert said_by(events) == [Measurement("WorkerLoadTime", ("W-9000-m_1", "Host"), [4593.0])]


def test_classes_of_answers_are_said_as_often_as_they_came() -> None:
    """What is neither 2xx nor 4xx is 5XX; nothing is said twice."""
    counts = ClassCounts()
    responses = [0, 0, 3, 1, 2, 4, 0, 0, 0, 0]

    assert list(counts.new(responses)) == [
        Measurement("Requests2XX", ("Host",), ONCE, 3),
        Measurement("Requests4XX", ("Host",), ONCE, 2),
        Measurement("Requests5XX", ("Host",), ONCE, 5),
    ]
    responses[2] += 1
    assert list(counts.new(responses)) == [Measurement("Requests2XX", ("Host",), ONCE, 1)]


def test_accepted_requests_are_said_once_though_the_counts_are_read_a_moment_apart() -> None:
    """A named request may be seen as named before it is seen at all."""
    counts = RequestCounts("m", "2.0")

    first = list(counts.new(10, 11))
    second = list(counts.new(13, 11))

    assert first == [Measurement("ts_inference_requests_total", ("m", "2.0"), ONCE, 11)]
    assert second == [Measurement("ts_inference_requests_total", ("m", "default"), ONCE, 2)]
