"""`batch_check.py`: planted faults are caught, right handlers pass, and what differs is said in few words."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from marserve_handlers.batch_check import (
    MOST_DIFFERENCES,
    MOST_TEXT,
    Difference,
    Outcome,
    Tolerance,
    Verdict,
    check_handler,
    differences,
    keep,
    plan_runs,
)
from support.batched_models import FAULTS, MODELS, RIGHT, SAMPLES, Handler, Model
from support.model_context import FakeItem, make_context


def model_named(name: str) -> Model:
    """One of the three models; torch's only where torch is."""
    if name == "torch":
        pytest.importorskip("torch")
    return MODELS[name]()


def check(handler: Handler, *, batch_size: int = 8, samples: list[Any] | None = None, **tolerance: Any) -> Verdict:
    """Check a handler with the samples of the models."""
    samples = SAMPLES if samples is None else samples
    rows = [{"body": bytearray(json.dumps(sample).encode())} for sample in samples]
    items = [FakeItem(id=f"sample-{index}") for index in range(len(samples))]
    return check_handler(handler, make_context(), rows, items, batch_size=batch_size, tolerance=Tolerance(**tolerance))


@pytest.mark.parametrize("model", [*("python", "numpy"), pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, model: str) -> None:
    """Whatever the model, and with the place of the first difference."""
    verdict = check(FAULTS[fault](model_named(model)))

    assert not verdict.has_passed
    assert verdict.differences
    assert all(difference.seen != difference.wanted for difference in verdict.differences)


@pytest.mark.parametrize("model", [*("python", "numpy"), pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_handler_passes(name: str, model: str) -> None:
    """With the tolerance that it documents."""
    make, tolerance = RIGHT[name]

    verdict = check(make(model_named(model)), **tolerance)

    assert verdict.has_passed, [str(difference) for difference in verdict.differences]
    assert max(verdict.sizes) == 8


def test_there_are_enough_of_both() -> None:
    """A dozen faults and twenty right handlers at least."""
    assert len(FAULTS) >= 12
    assert len(RIGHT) >= 20


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_with_batches_of_four_too(fault: str) -> None:
    """The samples do not fit into one batch then."""
    assert not check(FAULTS[fault](MODELS["python"]()), batch_size=4).has_passed


def test_a_handler_that_draws_lots_does_not_pass() -> None:
    """Unless its drawn place is left out."""
    drawn = iter(range(10_000))

    def handle(rows: list[Any], context: Any) -> list[Any]:
        return [{"id": next(drawn), "n": len(row["body"])} for row in rows]

    assert not check(handle).has_passed
    assert check(handle, ignore=("id",)).has_passed


def test_the_difference_names_item_path_and_values() -> None:
    """As a sentence for a person."""

    def handle(rows: list[Any], context: Any) -> list[Any]:
        return [{"boxes": [{"score": 0.5 if len(rows) == 1 else 0.75}]} for _ in rows]

    verdict = check(handle)

    assert verdict.differences[0] == Difference("together (5)", 0, "boxes[0].score", "0.75", "0.5")
    assert str(verdict.differences[0]) == "together (5): item 0 at boxes[0].score was 0.75, wanted 0.5"


def test_an_answer_of_another_item_is_called_that() -> None:
    """Who reads it need not compare numbers."""
    verdict = check(FAULTS["swapped order"](MODELS["python"]()))

    assert "the answer of item 1" in verdict.differences[0].seen


def test_a_missing_answer_is_told_as_a_count() -> None:
    """For the whole batch."""
    verdict = check(FAULTS["dropped item"](MODELS["python"]()))

    assert (verdict.differences[0].item, verdict.differences[0].seen) == (-1, "4 answers")


def test_what_it_says_is_bounded() -> None:
    """However much differs, and however long it is."""

    def handle(rows: list[Any], context: Any) -> list[Any]:
        return [{"text": f"{len(rows)}" * 10_000, "x" * 9000: len(rows)} for _ in rows]

    verdict = check(handle, samples=[[float(number)] for number in range(40)])

    assert len(verdict.differences) == MOST_DIFFERENCES
    assert verdict.found > MOST_DIFFERENCES
    for difference in verdict.differences:
        assert max(len(difference.seen), len(difference.wanted), len(difference.path)) <= MOST_TEXT


def test_a_sample_that_fails_alone_is_left_out_and_noted() -> None:
    """It would fail every batch it is in."""

    def handle(rows: list[Any], context: Any) -> list[Any]:
        if any(b"bad" in row["body"] for row in rows):
            raise ValueError("bad row")
        return [len(row["body"]) for row in rows]

    verdict = check(handle, samples=["bad", "fine", "finer"])

    assert verdict.has_passed
    assert verdict.notes == ["sample 0 fails alone: 503 ValueError: bad row"]


def test_with_nothing_to_compare_nothing_is_passed() -> None:
    """A handler that fails for every sample has shown nothing."""

    def handle(rows: list[Any], context: Any) -> list[Any]:
        raise ValueError("no")

    verdict = check(handle)

    assert not verdict.has_passed
    assert verdict.compared == 0


def test_what_one_sample_cannot_show_is_said() -> None:
    """Swapped answers look alike when there is only one."""
    assert check(FAULTS["swapped order"](MODELS["python"]()), samples=[[1.0]]).notes == [
        "fewer than two samples can be used: swapped answers cannot be seen"
    ]
    assert "all samples have the same answer" in check(lambda rows, context: [1] * len(rows)).notes[0]


def test_one_sample_alone_shows_lost_doubles() -> None:
    """It is sent more than once in a batch."""
    assert not check(FAULTS["duplicates removed"](MODELS["python"]()), samples=[[1.0, 2.0]]).has_passed


def test_it_stops_when_its_time_is_up() -> None:
    """And says so."""
    items = [FakeItem(id=str(index)) for index in range(3)]
    rows = [{"body": bytearray(b"%d" % index)} for index in range(3)]

    verdict = check_handler(
        lambda rows, context: [bytes(row["body"]) for row in rows],
        make_context(),
        rows,
        items,
        batch_size=2,
        limit_s=-1.0,
    )

    assert verdict.calls == 3
    assert "not every run was made" in verdict.notes[-1]
    assert not verdict.has_passed


def test_each_call_is_announced() -> None:
    """So that a limit can be watched call by call."""
    announced: list[int] = []
    rows = [{"body": bytearray(b"1")}]

    verdict = check_handler(
        lambda rows, context: [1] * len(rows),
        make_context(),
        rows,
        [FakeItem()],
        batch_size=2,
        before_call=lambda: announced.append(1),
    )

    assert len(announced) == verdict.calls


def test_a_unit_test_needs_rows_and_a_context_only() -> None:
    """As the page on handlers shows it."""
    rows = [{"body": bytearray(b"a")}, {"body": bytearray(b"b")}]

    verdict = check_handler(
        lambda rows, context: [context.get_request_header(0, "x") or bytes(row["body"]) for row in rows],
        make_context(),
        rows,
        batch_size=8,
    )

    assert verdict.has_passed, verdict.differences


def test_a_handler_that_ends_the_process_ends_it() -> None:
    """As it would in a batch."""

    def handle(rows: list[Any], context: Any) -> Any:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        check(handle)


@pytest.mark.parametrize(("count", "size"), [(1, 2), (1, 16), (2, 2), (3, 4), (5, 4), (7, 16), (64, 64), (3, 1000)])
def test_no_planned_batch_is_too_large_and_every_sample_is_in_some(count: int, size: int) -> None:
    """For any number of samples and any batch size."""
    runs = list(plan_runs(count, size))

    assert all(1 <= len(order) <= min(size, 64) for _, order in runs)
    assert all(0 <= place < count for _, order in runs for place in order)
    assert {place for name, order in runs for place in order if name == "together"} == set(range(count))
    assert max(len(order) for _, order in runs) == min(size, 64)
    assert len(runs[0][1]) > 1 or count == 1


@pytest.mark.parametrize(
    ("seen", "wanted", "are_alike"),
    [
        (1.0, 1.0 + 1e-7, True),
        (1.0, 1.1, False),
        (1, 1.0, True),
        (100_001, 100_000, False),
        (True, 1, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (None, 0, False),
        ("a", "a", True),
        ("a", "b", False),
        ("1.0000001", "1.0", True),
        ("[1, 2]", "[1,2]", True),
        (b'{"a": 1.00000001}', b'{"a": 1.0}', True),
        (b'{"a": 2}', b'{"a": 1}', False),
        (b"\xff\xd8", b"\xff\xd9", False),
        ("x", b"x", False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ([1, 2], (1, 2), True),
        ([1, 2], [2, 1], False),
        ([], [0], False),
        ({"a": [{"b": [1.0]}]}, {"a": [{"b": [1.0 + 1e-9]}]}, True),
        (object(), object(), True),
        (object(), {1, 2}, False),
        ("-", "-", True),
        ("NaN", "NaN", True),
        (1.5, "1.5", True),
        ({"a": 1}, {"a": "1"}, False),
        ({"a": '{"b": 1.0}'}, {"a": '{"b": 1.00000001}'}, True),
    ],
)
def test_values_are_compared_as_a_client_sees_them(seen: Any, wanted: Any, are_alike: bool) -> None:
    """Types, tolerance, JSON in text and in bytes."""
    found = list(differences(Outcome(keep(seen)), Outcome(keep(wanted)), Tolerance()))

    assert (not found) is are_alike


def test_arrays_are_compared_by_shape_type_and_value() -> None:
    """With the index of the first place that differs."""
    numpy = pytest.importorskip("numpy")

    def first(seen: Any, wanted: Any) -> Any:
        return next(differences(Outcome(keep(seen)), Outcome(keep(wanted)), Tolerance()), None)

    zeros = numpy.zeros((2, 2))
    assert first(zeros, zeros + 1e-9) is None
    assert first(zeros, numpy.array([[0, 0], [1, 0]])) is not None
    assert first(zeros, numpy.array([[0.0, 0.0], [1.0, 0.0]])) == ("[1][0]", "0.0", "1.0")
    assert first(zeros, numpy.zeros(4)) == ("", "array float64 [2, 2]", "array float64 [4]")
    assert first(numpy.array([math.nan]), numpy.array([math.nan])) is None
    assert first(numpy.float32(1), 1.0) is None


@pytest.mark.torch
def test_tensors_are_compared_by_value() -> None:
    """Also in types that numpy has not."""
    torch = pytest.importorskip("torch")

    def first(seen: Any, wanted: Any) -> Any:
        return next(differences(Outcome(keep(seen)), Outcome(keep(wanted)), Tolerance()), None)

    assert first(torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)) is None
    assert first(torch.ones(3), torch.tensor([1.0, 2.0, 1.0])) == ("[1]", "1.0", "2.0")
    assert first(torch.ones(3), [1.0, 1.0, 1.0]) is not None


def test_a_value_that_contains_itself_is_no_end_of_the_check() -> None:
    """It cannot be an answer, and is compared no further."""
    endless: list[Any] = []
    endless.append(endless)

    assert list(differences(Outcome(keep(endless)), Outcome(keep(endless)), Tolerance())) == []


@pytest.mark.parametrize(
    ("seen", "wanted", "found"),
    [
        ({"n": 3, "box": [1.5, 2]}, {"n": 10**400, "box": [-7, 2.5]}, None),
        ({"cat": 0.9, "dog": 0.1}, {"cat": 0.1, "dog": 0.9}, None),
        ({"cat": 0.9, "dog": 0.1}, {"cat": 0.8, "cow": 0.2}, None),
        ({"cat": 0.9, "dog": 0.1}, {"cow": 0.8, "dog": 0.2}, "cow"),
        ({"cat": 0.9}, {"cat": 0.8, "cow": 0.2}, "cow"),
        ({"cat": 3, "dog": 1}, {"cat": 3, "cow": 1}, "cow"),
        ({"best": "cat"}, {"best": "dog"}, "best"),
        ([1.0, 2.0], [1.0], ""),
        ([1.0], [math.nan], "[0]"),
        ([True], [False], "[0]"),
        ([None], [0.5], "[0]"),
    ],
)
def test_with_any_number_only_what_differs_in_more_than_numbers_is_found(seen: Any, wanted: Any, found: Any) -> None:
    """Of the best few classes a last one may be another; the best may not."""
    tolerance = Tolerance(any_number=True)

    first = next(differences(Outcome(keep(seen)), Outcome(keep(wanted)), tolerance), None)

    assert (None if first is None else first[0]) == found


def test_with_any_number_arrays_differ_in_shape_and_in_what_is_no_number() -> None:
    """Of whole numbers, too."""
    numpy = pytest.importorskip("numpy")

    def first(seen: Any, wanted: Any) -> Any:
        return next(differences(Outcome(keep(seen)), Outcome(keep(wanted)), Tolerance(any_number=True)), None)

    assert first(numpy.array([1, 2]), numpy.array([3, 4])) is None
    assert first(numpy.array([1.0, 2.0]), numpy.array([3.0, numpy.inf])) is None
    assert first(numpy.array([1.0, numpy.nan]), numpy.array([1.0, 2.0]))[0] == "[1]"
    assert first(numpy.array([1.0]), numpy.array([1.0, 2.0])) is not None
    assert first(numpy.array([True]), numpy.array([False])) is not None
