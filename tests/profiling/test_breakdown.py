"""Clocks and spans become parts of the time that add up to the whole."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from marserve.answers.profiles import ModelProfile
from marserve.messages import Profiled, ProfiledBatch
from marserve.profiling.analysis import Measured, analyse
from marserve.profiling.trace import merge

BOUND = 1 << 20


def op(name: str, begin: float, took: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    """An event of an operator, in milliseconds."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "tid": thread, "ts": begin * 1e3, "dur": took * 1e3, **more}


def mark(name: str, begin: float, took: float, thread: int = 1) -> dict[str, Any]:
    """An event of an annotation."""
    return op(name, begin, took, thread, cat="user_annotation")


def packed(*events: dict[str, Any]) -> bytes:
    """A trace of these."""
    return gzip.compress(json.dumps({"traceEvents": events}).encode())


def batch(
    number: int, *, ran: float, waited: float = 0.0, took: float = 100.0, collected: float = 0.0
) -> ProfiledBatch:
    """A batch of two requests, in milliseconds; a millisecond of decoding, two of encoding."""
    return ProfiledBatch(number, 2, 1.0, 0.001, took / 1e3, 0.002, ran / 1e3, waited / 1e3, collected / 1e3)


def profile(batches: list[ProfiledBatch], *traces: bytes, ranks: Sequence[int] = (), **fields: Any) -> ModelProfile:
    """What a worker measured for a second, analysed."""
    given = {"recorded": len(batches), "thread": 1, "threads": 1, "knows_waiting": True, "own_s": 0.0} | fields
    profiled = Profiled(1, 10.0, 11.0, batches, list(ranks) or [0] * len(traces), **given)
    return analyse(Measured(profiled, list(traces), BOUND))


def parts(made: ModelProfile) -> dict[str, float]:
    """The parts in milliseconds."""
    return {each.name: pytest.approx(each.ms, abs=0.01) for each in made.parts}


def test_the_time_in_a_handler_is_operators_python_sleep_and_collections() -> None:
    """What is left of the second was between the batches, and all of it adds up to the second."""
    trace = packed(
        mark("marserve batch 1: a,b", 0, 103),
        op("aten::linear", 1, 60),
        op("aten::addmm", 2, 58),  # inside of the one above: not counted twice
        op("aten::relu", 70, 5, thread=2),  # another thread's time is not this one's
    )

    made = profile([batch(1, ran=75, collected=5)], trace)

    assert parts(made) == {
        "operators": 60,
        "python": 10,
        "waiting": 0,
        "blocked": 25,
        "collections": 5,
        "decode": 1,
        "encode": 2,
        "between": 897,
    }
    assert sum(each.share for each in made.parts) == pytest.approx(1, abs=1e-4)
    assert (made.ms, made.requests, made.batches) == (1000, 2, 1)


def test_waiting_for_a_processor_is_shared_out_between_operators_and_python() -> None:
    """Beside a busy loop all takes twice as long: what ran is the same, and only the waiting is new."""
    trace = packed(mark("marserve batch 1: a", 0, 180), op("aten::mm", 0, 120))

    made = parts(profile([batch(1, ran=75, waited=75, took=175)], trace))

    assert [made[name] for name in ("operators", "python", "waiting", "blocked")] == [60, 15, 75, 25]


def test_an_operator_that_waits_for_its_own_threads_has_that_time() -> None:
    """It took longer than its thread ran or waited for a processor."""
    trace = packed(mark("marserve batch 1: a", 0, 100), op("aten::mm", 0, 90))

    made = parts(profile([batch(1, ran=70)], trace, threads=2))

    assert [made[name] for name in ("operators", "python", "blocked")] == [90, 0, 10]


def test_batches_that_were_not_recorded_count_as_those_that_were() -> None:
    """And a reader is told so."""
    trace = packed(mark("marserve batch 1: a", 0, 100), op("aten::mm", 0, 40))

    made = profile([batch(1, ran=80), batch(2, ran=60)], trace, recorded=1)

    assert [parts(made)[name] for name in ("operators", "python", "blocked")] == [70, 70, 60]
    assert made.remarks is not None
    assert "in 1 of 2 batches" in made.remarks[0]


def test_a_model_without_torch_has_its_clocks_alone() -> None:
    """With the reason; without any batch all was between them."""
    made = profile([batch(1, ran=80)], no_operators="this model does not use torch", recorded=0)
    idle = profile([], recorded=0)

    assert [parts(made)[name] for name in ("operators", "python", "blocked")] == [0, 80, 20]
    assert (made.noOperators, made.operators, made.hasTrace) == ("this model does not use torch", [], False)
    assert parts(idle)["between"] == 1000
    assert idle.remarks is not None
    assert "No request came" in idle.remarks[0]


def test_what_recording_took_belongs_to_no_part() -> None:
    """Writing a trace stops the worker, which is no fault of the model's."""
    made = profile([batch(1, ran=80)], own_s=0.5)

    assert made.ms == 500
    assert parts(made)["between"] == 397


def test_the_longest_operators_come_with_their_shapes_and_stacks() -> None:
    """An operator's own time is without what it called."""
    trace = packed(
        op("aten::linear", 0, 10, args={"Input Dims": [[2, 8], [8, 8], []]}),
        op("aten::addmm", 1, 8),
        op("aten::linear", 20, 4, args={"Input Dims": [[1, 8], [8, 8]]}),
    )

    made = profile([], trace)

    assert [(each.name, each.calls, each.selfMs, each.totalMs) for each in made.operators] == [
        ("aten::addmm", 1, 8, 8),
        ("aten::linear", 2, 6, 14),
    ]
    shapes = made.operators[1].shapes
    assert [(each.shapes, each.calls, each.ms) for each in shapes] == [
        ("[2, 8] [8, 8]", 1, 10),
        ("[1, 8] [8, 8]", 1, 4),
    ]
    assert made.operatorStacks is not None
    assert [(each.names, each.value) for each in made.operatorStacks] == [
        (["aten::linear", "aten::addmm"], 8),
        (["aten::linear"], 6),
    ]


def test_ranks_communicate_compute_do_both_or_idle() -> None:
    """Communication that runs while operators run is overlap; handing it over is no computing."""
    ours = packed(
        op("aten::mm", 0, 40),
        op("c10d::allreduce_", 40, 1),
        mark("gloo:all_reduce", 30, 30, thread=9),
        op("aten::add", 90, 10),
    )
    other = packed(op("aten::mm", 0, 50), mark("gloo:all_reduce", 50, 10, thread=9))

    made = profile([], ours, other, ranks=[0, 1])

    assert made.ranks is not None
    first, second = made.ranks
    assert (first.windowMs, first.communicationMs, first.computeMs, first.overlapMs, first.idleMs) == (
        100,
        30,
        50,
        10,
        30,
    )
    assert (second.communicationMs, second.overlapMs, second.idleMs) == (10, 0, 0)
    assert first.collectives == {"gloo:all_reduce": 1}


def zipped(text: bytes) -> bytes:
    """By gzip, the same each time: tests are named after it."""
    return gzip.compress(text, mtime=0)


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (b"no gzip", "not packed by gzip"),
        (zipped(b'{"traceEvents": [')[:-9], "cut off"),
        (zipped(b'{"traceEvents": [' + b" " * (2 * BOUND) + b"]}"), "more than"),
        (zipped(b'{"traceEvents": 3}'), "not in Chrome's format"),
        (zipped(b"[" * 100_000), "not in Chrome's format"),
        (zipped(b'{"traceEvents": [{"ph": "X", "dur": "long"}]}'), "not in Chrome's format"),
    ],
    ids=["no gzip", "cut off", "large", "no list", "deep", "no number"],
)
def test_a_trace_that_cannot_be_read_is_a_remark(trace: bytes, said: str) -> None:
    """A worker may have written anything; its clocks are still told."""
    made = profile([batch(1, ran=80)], trace)

    assert made.remarks is not None
    assert said in made.remarks[0]
    assert parts(made)["python"] == 80


def test_odd_events_change_nothing() -> None:
    """Times below zero, batches that nobody knows, arguments of other kinds."""
    trace = packed(
        op("aten::mm", 0, -5),
        mark("marserve batch 77: x", 0, 5),
        mark("marserve batch " + "9" * 40, 0, 5),
        op("aten::mm", 0, 5, args=[1]),
        op("aten::mm", 0, 5, args={"Input Dims": "x"}),
    )

    assert parts(profile([batch(1, ran=80)], trace))["python"] == 80


def test_times_that_are_no_numbers_once_they_are_added_are_left_out() -> None:
    """A worker may have written anything."""
    far = op("far", 0, 1) | {"ts": 1e308, "dur": 1.7e308}
    trace = packed(
        mark("marserve batch 1: a", 0, 103), op("aten::mm", 1, 60), far, mark("marserve batch 1: b", -1e305, 1)
    )

    made = profile([batch(1, ran=75)], trace)

    assert [each.name for each in made.operators] == ["aten::mm"]
    assert parts(made)["operators"] == 60


def test_many_small_batches_are_read_in_the_time_of_few() -> None:
    """Without a look at each operator for each batch, which took minutes."""
    many = 4000
    events = [mark(f"marserve batch {at + 1}: a", at * 10, 10) for at in range(many)]
    events += [op("aten::mm", at * 10 + within, 1) for at in range(many) for within in range(8)]
    batches = [batch(at + 1, ran=8, took=10) for at in range(many)]
    began = time.process_time()

    made = analyse(Measured(Profiled(1, 0.0, 60.0, batches, [0], many, 1, 1, True, 0.0), [packed(*events)], 1 << 24))

    assert parts(made)["operators"] == many * 8
    assert time.process_time() - began < 5


def test_a_single_trace_is_given_as_the_worker_packed_it() -> None:
    """To pack it anew would take longer than to read it; one that cannot be read is none."""
    trace = packed(op("aten::mm", 0, 5))

    assert merge([trace], BOUND) == trace
    for bad in (b"no gzip", zipped(b'{"traceEvents": 3}'), zipped(b"[]"), zipped(b'{"traceEvents": [')[:-9]):
        assert merge([bad], BOUND) == b""
