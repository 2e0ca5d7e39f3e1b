"""`worker/checks.py`: rows and answers on their way to the comparison and back."""

from __future__ import annotations

import msgspec
import pytest

from marserve.messages import Check, Item, Load, Result, pack_head
from marserve.option_values import Sample, Tolerance
from marserve.worker.checks import outcome_of, run_check, warm_up
from marserve.worker.load import LoadedModel
from marserve.worker.rows import rows_of
from support.model_context import make_context

LOAD = Load("m", "1.0", "", "h.py", None, None, batch_size=4)


def item(name: str, *parts: tuple[str, str | None]) -> Item:
    """One item."""
    return Item(name, list(parts), pack_head([], []), None)


def echo(rows: list[dict[str, object]], context: object) -> list[object]:
    """Bodies as they came."""
    return [bytes(row["body"]) for row in rows]  # type: ignore[call-overload]


def test_rows_are_decoded_as_those_of_requests() -> None:
    """Each part under its name, JSON as what it holds."""
    items = [item("a", ("x", None), ("y", "application/json")), item("b", ("body", "text/plain"))]
    bodies = [bytearray(b"1"), bytearray(b"[2]"), bytearray(b"three")]

    assert rows_of(items, bodies, decode_input=True) == [{"x": b"1", "y": [2]}, {"body": "three"}]
    assert rows_of(items, bodies, decode_input=False)[1] == {"body": b"three"}


def test_an_encoded_answer_is_compared_with_status_and_headers() -> None:
    """Names of headers in any case; a failure by its status and words."""
    answered = outcome_of(Result(201, "Made", [("X-A", "1")]), b"body")
    failed = outcome_of(Result(503, "Prediction failed", [], "handler"), b"")

    assert (answered.value, answered.status, answered.reason, answered.headers) == (b"body", 201, "Made", {"x-a": "1"})
    assert failed.failure == "503 Prediction failed"


def test_samples_are_checked_and_what_differs_comes_back_plain() -> None:
    """The verdict can be sent."""
    calls: list[int] = []

    def swapping(rows: list[dict[str, object]], context: object) -> list[object]:
        return echo(rows, context)[::-1]

    model = LoadedModel(swapping, make_context(), LOAD)
    items = [item("a", ("body", None)), item("b", ("body", None))]
    check = Check(7, items, 2, Tolerance(), 10.0)

    checked = run_check(model, check, [bytearray(b"a"), bytearray(b"b")], lambda: calls.append(1), lambda *_: None)  # type: ignore[arg-type, return-value]

    assert checked.number == 7
    assert checked.found > 0
    assert checked.calls == len(calls)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(checked), type=type(checked)) == checked


@pytest.mark.parametrize(
    ("tolerance", "told"),
    [(Tolerance(), (1e-3, 1e-5, "float32")), (Tolerance(0.5, 0.1, (), True), (0.5, 0.1, "batchTolerance"))],
)
def test_the_bound_that_was_used_is_told(tolerance: Tolerance, told: tuple[float, float, str]) -> None:
    """The model's precision, or what its configuration says."""
    model = LoadedModel(echo, make_context(), LOAD)
    check = Check(1, [item("a", ("body", None))], 2, tolerance, 10.0)

    checked = run_check(model, check, [bytearray(b"a")], lambda: None, lambda *_: None)  # type: ignore[arg-type, return-value]

    assert (checked.relative, checked.absolute, checked.basis) == told


def test_items_that_were_answered_in_a_batch_are_run_alone_and_compared() -> None:
    """What the batch answered is what was seen, the item alone what was wanted."""
    model = LoadedModel(echo, make_context(), LOAD)
    items = [item("a", ("body", None)), item("b", ("body", None))]
    wanted = [Result(200, "", []), Result(200, "", [])]
    check = Check(1, items, 1, Tolerance(), 10.0, wanted)
    bodies = [bytearray(b"a"), bytearray(b"b"), bytearray(b"a"), bytearray(b"x")]

    checked = run_check(model, check, bodies, lambda: None, lambda item, row: (Result(200, "", []), bytes(row["body"])))

    assert (checked.calls, checked.compared, checked.found) == (2, 2, 1)
    assert checked.differences == [("in a batch of 2", 1, "", "b'x'", "b'b'")]


def test_no_further_item_is_run_when_the_time_is_up() -> None:
    """What was paid for is used up."""
    model = LoadedModel(echo, make_context(), LOAD)
    check = Check(1, [item("a", ("body", None))], 1, Tolerance(), -1.0, [Result(200, "", [])])

    checked = run_check(
        model, check, [bytearray(b"a"), bytearray(b"a")], lambda: None, lambda item, row: (Result(200, "", []), b"")
    )

    assert checked.calls == 0


def test_warm_up_runs_each_sample_alone_and_all_together() -> None:
    """A failing one is told, and the rest goes on."""
    sizes: list[int] = []

    def handle(rows: list[dict[str, object]], context: object) -> list[object]:
        sizes.append(len(rows))
        if len(rows) == 1 and rows[0]["body"] == b"bad":
            raise ValueError("cold")
        return echo(rows, context)

    model = LoadedModel(handle, make_context(), LOAD)

    seconds, problems, failure = warm_up(model, [Sample(body=b"bad"), Sample(body=b"good"), Sample(file="none")])

    assert sizes == [1, 1, 2]
    assert seconds > 0
    assert problems == [
        "the sample 'none' of the archive cannot be read: No such file or directory",
        "warm-up with sample 0 failed: ValueError('cold')",
    ]
    assert failure == problems[1]


@pytest.mark.parametrize(("allowed", "sizes"), [([], [1, 1, 2, 3, 4]), ([1, 4], [1, 1, 2, 4])])
def test_a_compiled_model_is_warmed_up_in_batches_of_each_size(allowed: list[int], sizes: list[int]) -> None:
    """Of those that there may be: each may be compiled by itself. Samples come again where there are too few."""
    ran: list[list[object]] = []

    def handle(rows: list[dict[str, object]], context: object) -> list[object]:
        ran.append(echo(rows, context))
        return ran[-1]

    context = make_context()
    context.is_compiled = True
    model = LoadedModel(handle, context, msgspec.structs.replace(LOAD, allowed_batch_sizes=allowed))

    _, problems, _ = warm_up(model, [Sample(body=b"a"), Sample(body=b"b")])

    assert [len(batch) for batch in ran] == sizes
    assert ran[-1] == [b"a", b"b", b"a", b"b"]
    assert problems == []
