"""Which traces are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import pytest

from marserve.telemetry.happenings import Happening, Kind
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.recorder import BEGUN_TOGETHER, Recorder
from marserve.telemetry.timeline import Timeline
from marserve.telemetry.trace_context import RANDOM, SAMPLED, Parent, new_trace, own_trace
from marserve.telemetry.traces.exporter import Exporter
from marserve.telemetry.traces.sampling import Sampling, read_sampling
from marserve.telemetry.traces.spans import Span
from marserve.telemetry.traces.tracing import Tracing


class Nowhere:
    """Sends nothing."""

    def send(self, spans: Sequence[Span]) -> str:
        """Nothing."""
        return ""

    def close(self) -> None:
        """Nothing."""


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def ended(sampling: Sampling, wall_s: float = 0.1, status: int = 200, error: str = "") -> Timeline:
    """A request that has ended."""
    timeline = Timeline("a", 100.0, trace=new_trace(None, "x", sampling.flags))
    timeline.end(100.0 + wall_s, status, 0, error)
    return timeline


def test_a_share_of_the_traces_that_begin_here_is_kept() -> None:
    """By the ids, so that others decide alike."""
    sampling = Sampling(0.25)
    flags = [sampling.flags(None, own_trace("x").trace_id) for _ in range(4000)]
    assert 800 < sum(each & SAMPLED for each in flags) < 1200
    assert all(each & RANDOM for each in flags)
    assert sampling.flags(None, TRACE[:16] + "3" * 16) & SAMPLED
    assert not sampling.flags(None, TRACE[:16] + "4" + "0" * 15) & SAMPLED


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.25, 1.0])
def test_requests_without_a_caller_are_decided_as_others_would(share: float) -> None:
    """By the same digits of the id."""
    sampling = Sampling(share)
    tracing = Tracing(Exporter(Nowhere()), sampling)
    for _ in range(500):
        trace = tracing.begin((), "x")
        assert trace.flags == sampling.flags(None, trace.trace_id)
        assert trace.is_sampled == (int(trace.trace_id[16:], 16) < share * 2**64)


def test_a_request_without_a_timeline_is_sent_if_it_was_slow_and_known_if_the_recorder_has_room() -> None:
    """As one that had it from the beginning; the recorder's bounds on late ones do not bound what is sent."""
    exporter, recorder = Exporter(Nowhere()), Recorder(0)
    tracing = Tracing(exporter, Sampling(0.0, slower_than_s=1.0), recorder)
    assert tracing.refill(50.0)
    assert tracing.left == BEGUN_TOGETHER
    recorder.late_left = 2.0

    of = StageSeconds("m", "1", (0.1,))
    for number, wall_s in enumerate((0.1, 1.5, 1.6, 0.1)):
        timeline = Timeline(str(number), 50.0, of=of, trace=tracing.of(tracing.draw(), "x"))
        timeline.end(50.0 + wall_s, 200, 0)
        tracing.take_late(timeline)

    assert exporter.waiting == 2
    assert {each.id for each in recorder} == {"0", "1"}
    assert tracing.slow_above_s == 1.0
    assert not tracing.refill(50.01)
    assert tracing.refill(50.2)
    assert tracing.slow_above_s == recorder.slow_above_s < 1.0


def test_without_a_recorder_no_timelines_are_begun_for_it() -> None:
    """Only ids are drawn, and whether a request was slow is asked at its end."""
    tracing = Tracing(Exporter(Nowhere()), Sampling(0.0, slower_than_s=0.5))

    assert tracing.left == 0
    assert not tracing.refill(1e9)
    assert tracing.slow_above_s == 0.5


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_is_work_for_a_model_is_a_trace_of_its_own_and_nothing_else_is(kind: Kind) -> None:
    """Loads, downloads, evictions and roll-backs; stalls and the like are in metrics and in explanations."""
    exporter = Exporter(Nowhere())
    Tracing(exporter, Sampling(0.0)).note(Happening(kind, 1.0, 2.0, "m", "1", "it happened"))

    assert exporter.waiting == (kind in ("load", "download", "eviction", "rollback"))


@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_a_callers_flag_decides_before_the_share(flags: int) -> None:
    """Unless the sampler's name says otherwise."""
    parent = Parent(TRACE, "1" * 16, flags)
    assert Sampling(0.0).flags(parent, TRACE) == Sampling(1.0).flags(parent, TRACE) == flags
    assert Sampling(0.0, follows_parent=False).flags(parent, TRACE) == flags & RANDOM


def test_slow_and_failed_requests_are_kept_however_they_began() -> None:
    """A client's mistake, or its leaving, is no failure."""
    sampling = Sampling(0.0, slower_than_s=1.0)
    assert not sampling.keeps(ended(sampling))
    assert sampling.keeps(ended(sampling, wall_s=1.1))
    assert sampling.keeps(ended(sampling, status=503, error="queue_full"))
    assert sampling.keeps(ended(sampling, status=200, error="handler"))  # a stream that broke off
    assert not sampling.keeps(ended(sampling, status=404, error="unknown"))
    assert not sampling.keeps(ended(sampling, status=499, error="client_gone"))
    assert not Sampling(0.0).keeps(ended(sampling, wall_s=1000.0))
    assert not sampling.keeps(Timeline("a", 100.0))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Sampling(1.0)),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.1"}, Sampling(0.1)),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, Sampling(0.0, follows_parent=False)),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, Sampling(0.0)),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": " 0.5"}, Sampling(0.5, 0.0, False)),
    ],
)
def test_open_telemetrys_variables_say_what_no_setting_says(environment: dict[str, str], expected: Sampling) -> None:
    """By its own names."""
    assert read_sampling(None, 0.0, environment) == (expected, [])


def test_a_setting_comes_before_the_variables() -> None:
    """Whether the caller's flag decides is theirs alone."""
    environment = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    assert read_sampling(0.01, 2.0, environment)[0] == Sampling(0.01, 2.0, False)


@pytest.mark.parametrize(
    "environment",
    [{"OTEL_TRACES_SAMPLER": "jaeger_remote"}]
    + [{"OTEL_TRACES_SAMPLER_ARG": word} for word in ("x", "1.1", "-1", "nan", "inf", "x" * 10_000)],
)
def test_a_variable_that_cannot_be_read_is_told_of_and_ignored(environment: dict[str, str]) -> None:
    """The server starts all the same."""
    sampling, faults = read_sampling(None, 0.0, environment)
    assert sampling == Sampling(1.0)
    [fault] = faults
    assert fault.startswith(f"{next(iter(environment))} is '")
    assert len(fault) < 400
