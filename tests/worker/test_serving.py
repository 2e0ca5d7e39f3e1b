"""What becomes of a batch, a check and a question for lengths in a worker (`worker/serving.py`)."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from marserve.messages import (
    PACKED_BODY,
    AskLengths,
    Batch,
    Batches,
    Check,
    Checked,
    Item,
    Lengths,
    Load,
    Metrics,
    Piece,
    Raised,
    Result,
    Results,
    pack_head,
)
from marserve.option_values import Tolerance
from marserve.shared_page import Page, create_page
from marserve.worker.load import LoadedModel
from marserve.worker.outgoing import encode_value
from marserve.worker.rows import decode_value
from marserve.worker.serving import ServedModel
from marserve_handlers.context import send_intermediate_predict_response
from marserve_handlers.declared.answer import FailedEvent
from marserve_handlers.errors import BadInput, PredictionException
from support.model_context import make_context

LOAD = Load("m", "1.0", "", "h.py", None, None, 4, max_answer_bytes=1000)

Handle = Callable[[list[dict[str, Any]], Any], Any]


class Stage:
    """A loop around a handler, without a process: what it would have sent is kept."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.sent: list[tuple[Any, list[bytes]]] = []
        self.seen: list[list[dict[str, Any]]] = []

    def send(self, message: Any, bodies: Sequence[bytes] = ()) -> None:
        """As a connection to the server."""
        if type(message) is not Metrics:
            self.sent.append((message, list(bodies)))

    def serve(
        self, handle: Handle, items: list[Item], bodies: Sequence[bytes] = (), *, number: int = 1, **load: Any
    ) -> tuple[Any, list[bytes]]:
        """Serve one batch; the one message that ended it, with its bodies."""

        def seeing(rows: list[dict[str, Any]], context: Any) -> Any:
            self.seen.append(rows)
            return handle(rows, context)

        model = LoadedModel(seeing, make_context(), msgspec.structs.replace(LOAD, **load))
        served = ServedModel(self, self.page, model)  # type: ignore[arg-type]
        served.serve_batch(Batch(number, items), [bytearray(body) for body in bodies])
        return self.sent[-1]

    def serve_raw(self, handle: Handle, *bodies: bytes, **load: Any) -> tuple[Any, list[bytes]]:
        """Serve a batch of raw bodies."""
        return self.serve(handle, [item() for _ in bodies], bodies, **load)


def item(*parts: tuple[str, str | None], deadline: float | None = None, **headers: str) -> Item:
    """One request; a raw body without a type unless told otherwise."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Item("id", list(parts) or [("body", None)], pack_head(pairs, []), deadline)


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A stage with a page of its own."""
    descriptor = create_page()
    page = Page(descriptor)
    os.close(descriptor)
    yield Stage(page)
    page.close()


def echo(rows: list[dict[str, Any]], context: Any) -> list[Any]:
    """Answer what came."""
    return [row["body"] for row in rows]


def test_an_answer_that_the_wire_does_not_carry_is_told_as_a_failure(stage: Stage) -> None:
    """What the handler set besides may be too much; nothing of it was written by then."""
    send = stage.send

    def refuse(message: Any, bodies: Sequence[bytes] = ()) -> None:
        if type(message) is Results:
            raise ValueError("a frame's metadata has too many bytes")
        send(message, bodies)

    stage.send = refuse  # type: ignore[method-assign]

    told, _ = stage.serve_raw(echo, b"x")

    assert type(told) is Raised
    assert (told.number, told.kind, told.code) == (1, "handler", 503)
    assert "too many bytes" in told.traceback


# ------------------------------------------------------------------------------------------- what handlers see


@pytest.mark.parametrize(
    ("content_type", "body", "seen"),
    [
        (None, b"x", bytearray(b"x")),
        ("application/octet-stream", b"x", bytearray(b"x")),
        ("application/json", b'{"a": [1, null]}', {"a": [1, None]}),
        ("application/json; charset=utf-8", b"1", 1),
        ("Application/JSON", b"1", bytearray(b"1")),
        ("application/json", b"{broken", bytearray(b"{broken")),
        ("application/json", b"", bytearray(b"")),
        ("application/json", b"[" * 100_000, bytearray(b"[" * 100_000)),
        ("application/json", b"\xff", bytearray(b"\xff")),
        ("text/plain", "é".encode(), "é"),
        ("text/csv; charset=latin-1", b"a,b", "a,b"),
        ("text", b"a", "a"),
        ("text/plain", b"\xff", bytearray(b"\xff")),
        ("image/png", b"\x89PNG", bytearray(b"\x89PNG")),
    ],
)
def test_a_value_is_decoded_by_its_own_content_type(content_type: str | None, body: bytes, seen: Any) -> None:
    """The contract's §1.3, its oddities included."""
    value = decode_value(bytearray(body), content_type) if content_type else bytearray(body)

    assert value == seen
    assert type(value) is type(seen)


def test_a_row_holds_each_part_under_its_name(stage: Stage) -> None:
    """Of two of one name the later wins."""
    items = [item(("a", "text/plain"), ("b", None), ("a", "application/json"))]

    stage.serve(lambda rows, context: [""], items, [b"first", b"raw", b"[2]"])

    assert stage.seen == [[{"a": [2], "b": bytearray(b"raw")}]]


def test_each_item_gets_its_own_parts(stage: Stage) -> None:
    """Bodies lie one after the other behind the metadata; an item may have none."""
    items = [item(("a", None)), Item("id", [], pack_head([], []), None), item(("b", None), ("c", None))]

    stage.serve(lambda rows, context: ["", "", ""], items, [b"1", b"2", b"3"])

    assert stage.seen == [[{"a": b"1"}, {}, {"b": b"2", "c": b"3"}]]


def test_decoding_can_be_switched_off(stage: Stage) -> None:
    """`decode_input_request=false`: always bytes."""
    stage.serve(echo, [item(("body", "application/json"))], [b"[1]"], decode_input=False)

    assert stage.seen == [[{"body": bytearray(b"[1]")}]]


def test_headers_and_ids_reach_the_context(stage: Stage) -> None:
    """In the case in which they came."""
    told = []

    def handle(rows: list[dict[str, Any]], context: Any) -> list[str]:
        told.append((context.get_request_id(0), context.get_request_header(0, "X_My"), context.deadline(0)))
        return [""]

    stage.serve(handle, [Item("id-7", [("body", None)], pack_head([(b"X_My", b"v")], []), 1e12)], [b""])

    assert told == [("id-7", "v", 1e12)]


# ------------------------------------------------------------------------------------------- what clients get


@pytest.mark.parametrize(
    ("value", "body", "is_json"),
    [
        (b"raw", b"raw", False),
        (bytearray(b"raw"), b"raw", False),
        ("é", "é".encode(), False),
        (
            {"a": 1, "é": [1.5, None, True]},
            b'{\n  "a": 1,\n  "\\u00e9": [\n    1.5,\n    null,\n    true\n  ]\n}',
            True,
        ),
        ([], b"[]", True),
        ({}, b"{}", True),
        ((1, 2), b"[\n  1,\n  2\n]", True),
        (7, b"7", False),
        (None, b"null", False),
        (True, b"true", False),
        ({1: 2}, b'{\n  "1": 2\n}', True),
    ],
)
def test_an_element_becomes_a_body(value: Any, body: bytes, is_json: bool) -> None:
    """The contract's §1.4: JSON as TorchServe lays it out, byte for byte."""
    assert encode_value(value) == (body, is_json)
    if is_json:
        assert body == json.dumps(value, indent=2).encode()


def test_numbers_that_json_has_not_are_written_as_python_writes_them() -> None:
    """As by TorchServe; its clients are used to it."""
    assert encode_value([math.nan, math.inf]) == (b"[\n  NaN,\n  Infinity\n]", False)


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, {(1, 2): 3}, {"a": b"bytes"}], ids=["an object", "a set", "a tuple as a key", "bytes"]
)
def test_what_json_cannot_say_is_an_error(value: Any) -> None:
    """Its item fails, alone."""
    with pytest.raises(TypeError):
        encode_value(value)


@pytest.mark.torch
def test_a_tensor_is_saved() -> None:
    """As TorchServe does; clients load it with `weights_only`."""
    torch = pytest.importorskip("torch")
    import io

    body, is_json = encode_value(torch.ones(2, 3))

    assert not is_json
    assert torch.equal(torch.load(io.BytesIO(body), weights_only=True), torch.ones(2, 3))


def test_an_untouched_answer_is_a_200_without_headers(stage: Stage) -> None:
    """The surface adds what the contract wants."""
    message, bodies = stage.serve_raw(echo, b"a", b"b")

    assert (message.results, bodies) == ([Result(200, "", []), Result(200, "", [])], [b"a", b"b"])


def test_a_worker_tells_how_it_spent_the_time_of_a_batch(stage: Stage) -> None:
    """Before, in and after the author's code, with the spans that the author named."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        with context.span("tokenise"):
            time.sleep(0.02)
        time.sleep(0.01)
        return ["a"] * len(rows)

    before = time.monotonic()
    message, _ = stage.serve_raw(handle, b"a")
    now, work = time.monotonic(), message.work

    assert work is not None
    assert before <= work.began <= now
    assert 0.03 <= message.handler_s <= now - before
    assert work.decode_s + message.handler_s + work.encode_s <= now - work.began
    (span,) = work.spans
    assert span.name == "tokenise"
    assert 0.02 <= span.seconds <= message.handler_s
    assert work.decode_s <= span.after_s <= work.decode_s + 0.01


def test_a_batch_that_raised_has_its_spans_too(stage: Stage) -> None:
    """That is when they are read."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        with context.span("tokenise"):
            raise ValueError("no")

    message, _ = stage.serve_raw(handle, b"a")

    assert [span.name for span in message.work.spans] == ["tokenise"]


def test_spans_of_one_batch_are_not_those_of_the_next(stage: Stage) -> None:
    """And of one batch there are at most 32."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        for number in range(40 if rows[0]["body"] == b"many" else 0):
            with context.span(f"{number} " + "x" * 100):
                pass
        return ["a"]

    many, _ = stage.serve_raw(handle, b"many")
    none, _ = stage.serve_raw(handle, b"none")

    assert [len(span.name) for span in many.work.spans] == [64] * 32
    assert none.work.spans == []


def test_status_and_headers_of_the_handlers_choosing_go_out(stage: Stage) -> None:
    """For each item its own."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        context.set_response_status(201, "Made", idx=1)
        context.set_response_header(1, "X-A", "b")
        context.set_response_content_type(2, "text/x")
        return ["a", "b", {}]

    message, _ = stage.serve_raw(handle, b"", b"", b"")

    assert message.results == [
        Result(200, "", []),
        Result(201, "Made", [("X-A", "b")]),
        Result(200, "", [("content-type", "text/x")]),
    ]


def test_an_answer_that_is_json_says_so_unless_the_handler_did(stage: Stage) -> None:
    """Documents only; a number or a word alone goes out without a type."""
    message, _ = stage.serve_raw(lambda rows, context: [{"a": 1}, 7], b"", b"")

    assert [result.headers for result in message.results] == [[("content-type", "application/json")], []]


def test_what_one_batch_set_is_forgotten_by_the_next(stage: Stage) -> None:
    """One context lives as long as the worker."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        if rows[0]["body"] == b"first":
            context.set_response_status(500, "No", idx=0)
        return ["x"]

    model = LoadedModel(handle, make_context(), LOAD)
    served = ServedModel(stage, stage.page, model)  # type: ignore[arg-type]
    for number, body in enumerate([b"first", b"second"], 1):
        served.serve_batch(Batch(number, [item()]), [bytearray(body)])

    assert [message.results[0].status for message, _ in stage.sent] == [500, 200]


def test_an_answer_over_the_limit_fails_alone(stage: Stage) -> None:
    """At the limit it is fine."""
    message, bodies = stage.serve_raw(lambda rows, context: [b"x" * 1000, b"x" * 1001], b"", b"")

    assert [result.error for result in message.results] == [None, "too_large"]
    assert "max_response_size, 1000" in message.results[1].reason
    assert [len(body) for body in bodies] == [1000, 0]


def test_an_element_that_cannot_be_written_fails_alone(stage: Stage) -> None:
    """TorchServe failed its whole batch."""
    message, bodies = stage.serve_raw(lambda rows, context: ["a", object(), "c"], b"", b"", b"")

    assert [result.error for result in message.results] == [None, "handler", None]
    assert message.results[1].reason == "Unsupported model output data type."
    assert bodies == [b"a", b"", b"c"]


def test_an_element_that_takes_too_much_memory_to_write_is_told_as_that(stage: Stage) -> None:
    """507, not a fault of the handler's type."""

    class Huge(dict[str, str]):
        def items(self) -> Any:
            raise MemoryError

    message, _ = stage.serve_raw(lambda rows, context: [Huge(a="b")], b"")

    assert (message.results[0].error, message.results[0].status) == ("memory", 507)


def test_a_header_of_the_wrong_type_fails_alone(stage: Stage) -> None:
    """No response can carry it."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        context.set_response_header(0, "X", 7)
        return ["a", "b"]

    message, _ = stage.serve_raw(handle, b"", b"")

    assert [result.error for result in message.results] == ["bad_header", None]


def test_headers_that_are_too_long_fail_alone_and_are_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The author finds the request and the reason in the model log; the worker goes on."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        context.set_response_header(1, "X", "v" * 70_000)
        return ["a", "b"]

    message, bodies = stage.serve_raw(handle, b"", b"")

    assert [(result.error, result.status) for result in message.results] == [(None, 200), ("bad_header", 503)]
    assert "70005 bytes; they may have 65536 in all" in message.results[1].reason
    assert bodies == [b"a", b""]
    [logged] = [record for record in caplog.records if record.name == "marserve.worker"]
    assert (logged.levelname, "70005 bytes; they may have 65536" in logged.getMessage()) == ("ERROR", True)
    assert stage.serve_raw(lambda rows, context: ["c"], b"")[1] == [b"c"]


def test_an_exception_in_the_place_of_an_answer_fails_its_item_alone(stage: Stage) -> None:
    """Told as if it had been raised; what was set for the item's response does not go out."""

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        context.set_response_header(1, "X-Mine", "1")
        return ["a", PredictionException("No such cat", 404), MemoryError(), Unspeakable(), KeyError("k"), "f"]

    message, bodies = stage.serve_raw(handle, *[b""] * 6)

    assert [(result.error, result.status, result.reason) for result in message.results] == [
        (None, 200, ""),
        ("prediction", 404, "No such cat"),
        ("memory", 507, "Out of resources"),
        ("handler", 503, "Prediction failed"),
        ("handler", 503, "Prediction failed"),
        (None, 200, ""),
    ]
    assert message.results[1].headers == []
    assert bodies == [b"a", b"", b"", b"", b"", b"f"]


def test_an_exception_meant_for_the_client_is_one_line_of_the_log(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the author's own has its traceback."""
    caplog.set_level(logging.INFO)

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        return [BadInput("expected a cat", "pet"), KeyError("k")]

    stage.serve_raw(handle, b"", b"")

    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "marserve.worker"]
    assert said == [
        ("INFO", "Request id: pet: expected a cat"),
        ("ERROR", "Request id: Prediction failed\nKeyError: 'k'"),
    ]


def test_a_piece_may_be_an_exception_too(stage: Stage) -> None:
    """That item's stream ends with it."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        pieces = ["a1", PredictionException("No more", 410)]
        send_intermediate_predict_response(pieces, context.request_ids, "", 200, context)
        return ["a2", "unseen"]

    stage.serve_raw(handle, b"", b"")

    piece, bodies = stage.sent[0]
    assert [(result.error, result.status) for result in piece.results] == [(None, 200), ("prediction", 410)]
    assert bodies == [b"a1", b""]


@pytest.mark.parametrize("sets_header", [False, True])
def test_the_last_event_of_a_failed_stream_is_an_answer_with_what_was_raised(stage: Stage, sets_header: bool) -> None:
    """Bounded as that of a failure; nothing of an error that is meant for the client."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        if sets_header:
            for index in range(3):
                context.set_response_header(index, "X-Mine", "1")
        return [
            FailedEvent.of(b"one", ValueError("x" * 100_000)),
            FailedEvent.of(b"two", BadInput("expected a cat", "pet")),
            b"whole",
        ]

    message, bodies = stage.serve_raw(handle, b"", b"", b"")

    first, second, third = message.results
    assert bodies == [b"one", b"two", b"whole"]
    assert [(result.error, result.status) for result in message.results] == [(None, 200)] * 3
    assert first.thrown.type == "ValueError"
    assert 0 < len(first.thrown.message) < 100_000
    assert "ValueError: xxx" in first.thrown.traceback
    assert (second.thrown, third.thrown) == (None, None)


# ------------------------------------------------------------------------------------------- checks


def test_a_question_for_lengths_is_answered_without_a_word_on_the_page(stage: Stage) -> None:
    """The batch behind it has not begun: a worker that dies here gives it back unrun."""
    model = LoadedModel(echo, make_context(), LOAD, lambda row: len(row["body"]))
    served = ServedModel(stage, stage.page, model)  # type: ignore[arg-type]

    served.serve_lengths(AskLengths(7, [item(), item()], 1.0), [bytearray(b"four"), bytearray(b"x")])

    told = stage.sent[-1][0]
    assert isinstance(told, Lengths)
    assert (told.number, told.lengths) == (7, [4, 1])
    assert stage.page.running[0] == 0
    assert stage.page.finished == 0


def test_a_check_is_a_batch_to_whoever_watches_the_page(stage: Stage) -> None:
    """It is begun anew with each call of the handler, and finished once."""
    running: list[int] = []

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        running.append(stage.page.running[0])
        context.metrics.add_counter("Seen", 1)
        return echo(rows, context)

    served = ServedModel(stage, stage.page, LoadedModel(handle, make_context(), LOAD))  # type: ignore[arg-type]
    served.serve_check(Check(3, [item(), item()], 2, Tolerance(), 10.0), [bytearray(b"a"), bytearray(b"b")])

    checked, _ = stage.sent[-1]
    assert isinstance(checked, Checked)
    assert (checked.number, checked.found) == (3, 0)
    assert set(running) == {3}
    assert len(running) == checked.calls
    assert stage.page.running[0] == 0
    assert stage.page.finished == 1


@pytest.mark.parametrize(
    ("handle", "wanted"),
    [
        (echo, 0),
        (lambda rows, context: [b"other"], 1),
        (lambda rows, context: [b"a", b"b"], 1),
        (lambda rows, context: (b"a",), 1),
        (lambda rows, context: [PredictionException("no", 400)], 1),
        (lambda rows, context: 1 / 0, 1),
    ],
)
def test_an_item_that_is_run_again_is_compared_as_it_would_be_sent(stage: Stage, handle: Handle, wanted: int) -> None:
    """Whatever the handler makes of it."""
    served = ServedModel(stage, stage.page, LoadedModel(handle, make_context(), LOAD))  # type: ignore[arg-type]
    check = Check(1, [item()], 1, Tolerance(), 10.0, [Result(200, "", [])])

    served.serve_check(check, [bytearray(b"a"), bytearray(b"a")])

    checked, _ = stage.sent[-1]
    assert (checked.calls, checked.found) == (1, wanted)


@pytest.mark.parametrize(
    ("handle", "words"),
    [
        (lambda rows, context: [b"a", b"b"], "number of batch response mismatched"),
        (lambda rows, context: (b"a",), "number of batch response mismatched"),
        (lambda rows, context: 1 / 0, "Prediction failed"),
    ],
)
def test_an_item_that_fails_again_as_it_did_does_not_differ(stage: Stage, handle: Handle, words: str) -> None:
    """What is no list of one answer is the 503 that a client would get."""
    served = ServedModel(stage, stage.page, LoadedModel(handle, make_context(), LOAD))  # type: ignore[arg-type]
    check = Check(1, [item()], 1, Tolerance(), 10.0, [Result(503, words, [], "handler")])

    served.serve_check(check, [bytearray(b"a"), bytearray()])

    checked, _ = stage.sent[-1]
    assert (checked.calls, checked.found) == (1, 0)


# ------------------------------------------------------------------------------------------- raising


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("secret"), ("handler", "Prediction failed", 503)),
        (PredictionException("No such cat", 404), ("prediction", "No such cat", 404)),
        (MemoryError(), ("memory", "Out of resources", 507)),
        (RuntimeError("CUDA out of memory. Tried"), ("memory", "Out of resources", 507)),
        (KeyboardInterrupt(), ("handler", "Prediction failed", 503)),
        (GeneratorExit(), ("handler", "Prediction failed", 503)),
    ],
    ids=repr,
)
def test_what_a_handler_raises_is_told_as_data(stage: Stage, error: BaseException, told: tuple[str, str, int]) -> None:
    """Kind, message and code for the client, the traceback for the log."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        raise error

    message, bodies = stage.serve_raw(handle, b"", b"")

    assert type(message) is Raised
    assert (message.kind, message.message, message.code) == told
    assert type(error).__name__ in message.traceback
    assert bodies == []
    assert stage.page.running[0] == 0
    assert stage.page.finished == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "Invalid model predict output"),
        ("ab", "Invalid model predict output"),
        (("a", "b"), "Invalid model predict output"),
        (["a"], "number of batch response mismatched"),
        (["a", "b", "c"], "number of batch response mismatched"),
    ],
    ids=repr,
)
def test_an_answer_that_cannot_be_cut_into_items_fails_them_all(stage: Stage, answer: Any, said: str) -> None:
    """In TorchServe's words."""
    message, _ = stage.serve_raw(lambda rows, context: answer, b"", b"")

    assert type(message) is Raised
    assert (message.message, message.code, message.number) == (said, 503, 1)
    assert type(message.handler_s) is float


def test_leaving_is_not_swallowed(stage: Stage) -> None:
    """An author who exits means it."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        sys.exit(3)

    with pytest.raises(SystemExit):
        stage.serve_raw(handle, b"")
    assert stage.page.running[0] == 1  # what it had begun, for whoever asks why


# ------------------------------------------------------------------------------------------- expired, cancelled


def test_batches_of_one_frame_are_answered_one_by_one(stage: Stage) -> None:
    """Each by its number, with the bodies that are its own; one that raises is told between the others."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        if any(row["body"] == b"bad" for row in rows):
            raise ValueError("bad")
        return echo(rows, context)

    served = ServedModel(stage, stage.page, LoadedModel(handle, make_context(), LOAD))  # type: ignore[arg-type]
    batches = [Batch(3, [item(), item()]), Batch(4, [item()]), Batch(5, [item(("x", None), ("body", None))])]
    bodies = [bytearray(body) for body in (b"a", b"b", b"bad", b"other", b"c")]

    served.serve_batches(Batches(batches), bodies)

    ended, raised, last = stage.sent
    assert (ended[0].number, ended[1]) == (3, [b"a", b"b"])
    assert (type(raised[0]), raised[0].number) == (Raised, 4)
    assert (last[0].number, last[1]) == (5, [b"c"])


def test_an_item_that_is_not_json_fails_alone_where_such_bodies_are_refused(stage: Stage) -> None:
    """The handler gets the others; the client gets 400 with line and column."""
    items = [item(("body", "application/json")) for _ in range(3)]

    message, bodies = stage.serve(
        lambda rows, _: [row["body"] for row in rows], items, [b"[1]", b"[1", b"[2]"], refuses_bad_json=True
    )

    assert stage.seen == [[{"body": [1]}, {"body": [2]}]]
    assert [result.error for result in message.results] == [None, "bad_input", None]
    assert message.results[1].status == 400
    assert message.results[1].reason == "the body is not JSON: Expecting ',' delimiter at line 1, column 3"
    assert [json.loads(body) for body in (bodies[0], bodies[2])] == [[1], [2]]


def test_a_body_of_open_inference_that_is_more_than_json_or_compressed_is_not_decoded(stage: Stage) -> None:
    """Whatever its content type says; without the server's marks it is."""
    head = (b"Inference-Header-Content-Length", b"1")
    mark, packed = ("open_inference", "v2"), (PACKED_BODY, "gzip 1000")
    given = [([head], [mark]), ([], [mark, packed]), ([head], [packed]), ([], [mark])]
    items = [Item("id", [("body", "application/json")], pack_head(lines, marks), None) for lines, marks in given]

    stage.serve(lambda rows, _: [b"" for _ in rows], items, [b"1"] * 4)

    assert stage.seen == [[{"body": b"1"}, {"body": b"1"}, {"body": 1}, {"body": 1}]]


class Sent(bytearray):
    """A body that can be watched."""


def test_the_body_of_an_item_that_is_not_json_is_kept_by_nothing(stage: Stage) -> None:
    """Nor by a cycle of its refusal and a frame: clients choose how large it is, and how many come."""
    model = LoadedModel(echo, make_context(), msgspec.structs.replace(LOAD, refuses_bad_json=True))
    served = ServedModel(stage, stage.page, model)  # type: ignore[arg-type]
    watched: list[weakref.ref[Sent]] = []

    def refuse() -> None:
        bodies = [Sent(b"[1"), Sent(b"{")]
        watched.extend(weakref.ref(each) for each in bodies)
        served.serve_batch(Batch(1, [item(("body", "application/json"))] * 2), [*bodies])

    gc.collect()
    gc.disable()
    try:
        refuse()
        assert [each() for each in watched] == [None, None]
    finally:
        gc.enable()


def test_a_batch_without_a_readable_item_does_not_reach_the_handler(stage: Stage) -> None:
    """There is no row to call it with."""
    message, _ = stage.serve(lambda rows, _: rows, [item(("body", "application/json"))], [b""], refuses_bad_json=True)

    assert stage.seen == []
    assert [result.reason for result in message.results] == ["the body is not JSON: it is empty"]


def test_expired_and_cancelled_items_never_reach_the_handler(stage: Stage) -> None:
    """It sees the rest, numbered from 0; the answers stand where they belong."""
    stage.page.cancel(5, 2)
    late = time.monotonic() - 1.0
    items = [item(deadline=late), item(deadline=late + 100), item(), item()]

    message, bodies = stage.serve(echo, items, [b"0", b"1", b"2", b"3"], number=5)

    assert stage.seen == [[{"body": b"1"}, {"body": b"3"}]]
    assert [result.error for result in message.results] == ["expired", None, "cancelled", None]
    assert [result.status for result in message.results] == [504, 200, 499, 200]
    assert bodies == [b"", b"1", b"", b"3"]


def test_a_batch_that_nobody_wants_does_not_call_the_handler(stage: Stage) -> None:
    """It costs nothing but a message."""
    stage.page.cancel(1, 1)

    message, bodies = stage.serve(echo, [item(deadline=0.0), item()], [b"", b""])

    assert stage.seen == []
    assert [(result.error, result.status) for result in message.results] == [("expired", 504), ("cancelled", 499)]
    assert bodies == [b"", b""]
    assert (message.handler_s, stage.page.finished) == (0.0, 1)


def test_a_cancel_while_it_runs_is_seen_under_the_handlers_own_number(stage: Stage) -> None:
    """The first item expired, so the client's second item is the handler's first."""
    seen = []

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        before = [context.is_cancelled(0), context.is_cancelled(1)]
        stage.page.cancel(9, 2)
        seen.append((before, [context.is_cancelled(0), context.is_cancelled(1)]))
        return ["a", "b"]

    stage.serve(handle, [item(deadline=0.0), item(), item()], [b"", b"", b""], number=9)

    assert seen == [([False, False], [False, True])]


# ------------------------------------------------------------------------------------------- streams


def test_pieces_are_sent_as_they_come(stage: Stage) -> None:
    """Before the batch has ended, one for each item."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        send_intermediate_predict_response(["a1", "b1"], context.request_ids, "", 200, context)
        assert [type(message) for message, _ in stage.sent] == [Piece]
        return ["a2", "b2"]

    stage.serve_raw(handle, b"", b"")

    assert [(type(message), bodies) for message, bodies in stage.sent] == [
        (Piece, [b"a1", b"b1"]),
        (Results, [b"a2", b"b2"]),
    ]
    headers = [dict(message.results[0].headers)["ts_stream_next"] for message, _ in stage.sent]
    assert headers == ["true", "false"]


def test_pieces_have_a_place_for_items_that_expired(stage: Stage) -> None:
    """The handler knows nothing of those."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        send_intermediate_predict_response(["piece"], context.request_ids, "", 200, context)
        return ["end"]

    stage.serve(handle, [item(deadline=0.0), item()], [b"", b""])

    piece, bodies = stage.sent[0]
    assert [result.error for result in piece.results] == ["expired", None]
    assert bodies == [b"", b"piece"]


@pytest.mark.parametrize("pieces", [["only one"], ["a", "b", "c"], ("a", "b"), "ab"])
def test_what_is_no_list_of_a_piece_for_each_row_is_the_handlers_fault(stage: Stage, pieces: Any) -> None:
    """It hears of it where it sent them: a text of as many characters is no list of pieces."""

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        send_intermediate_predict_response(pieces, context.request_ids, "", 200, context)
        return ["a", "b"]

    message, _ = stage.serve_raw(handle, b"", b"")

    assert type(message) is Raised
    assert "a list of 2 pieces" in message.traceback


# ------------------------------------------------------------------------------------------- the page


def test_the_page_tells_what_runs_while_it_runs(stage: Stage) -> None:
    """Number and beginning; afterwards nothing, and one more finished."""
    seen = []

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        seen.append(stage.page.running)
        return ["x"]

    before = time.monotonic()
    stage.serve(handle, [item()], [b""], number=4)

    [(number, began)] = seen
    assert number == 4
    assert before <= began <= time.monotonic()
    assert (stage.page.running[0], stage.page.finished) == (0, 1)


def test_a_batch_is_finished_before_it_is_answered(stage: Stage) -> None:
    """Whoever reads the answer may rely on the page."""
    finished = []
    send = stage.send
    stage.send = lambda message, bodies=(): (finished.append(stage.page.finished), send(message, bodies))  # type: ignore[method-assign,assignment]

    stage.serve_raw(echo, b"")

    assert finished == [1]


# ------------------------------------------------------------------------------------------- another machine's clock


def test_deadlines_of_a_server_on_another_machine_are_on_this_ones_clock(stage: Stage) -> None:
    """What is in the past there is so here, and the handler is told the time that its own clock will show."""
    ahead_s = 1e6
    now = time.monotonic()
    told: list[float | None] = []

    def handle(rows: list[dict[str, Any]], context: Any) -> list[Any]:
        told.append(context.deadline(0))
        return [row["body"] for row in rows]

    stage.page.set_clock_ahead(ahead_s)
    items = [item(deadline=now + ahead_s - 1), item(deadline=now + ahead_s + 60), item()]
    message, bodies = stage.serve(handle, items, [b"late", b"early", b"any"])

    assert [result.error for result in message.results] == ["expired", None, None]
    assert bodies == [b"", b"early", b"any"]
    assert told == [pytest.approx(now + 60)]
