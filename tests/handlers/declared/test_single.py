"""Tests for models of one annotated item: what is read, what is refused, what goes out."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict

from marserve_handlers import BadInput, model
from marserve_handlers.declared.declaration import DeclarationError
from marserve_handlers.declared.decorator import Definition
from marserve_handlers.declared.item_context import ItemContext
from marserve_handlers.declared.opening import declare
from marserve_handlers.support.line_owner import of_this_task
from support.declared_models import Opening
from support.model_context import FakeItem


class Person(BaseModel):
    """Of pydantic."""

    name: str
    age: int


@dataclass
class Point:
    """A dataclass."""

    x: float
    y: float = 0.0


class Options(TypedDict):
    """A typed dict."""

    depth: int


@model
def greet(person: Person) -> str:
    """Says what it knows."""
    return f"{person.name}, {person.age}"


@model
def double(point: Point) -> Point:
    """Twice as far."""
    return Point(2 * point.x, 2 * point.y)


@model
def same(value: dict[str, Any]) -> Any:
    """Gives back what came."""
    return value


@model
def upper(text: str) -> str:
    """In capitals."""
    return text.upper()


@model
def backwards(data: bytes) -> bytes:
    """Turned round."""
    return data[::-1]


@model
def turned(picture: Image.Image) -> Image.Image:
    """Upside down."""
    return picture.rotate(180)


# ------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("target", "body", "message"),
    [
        (greet, {"name": "Ada", "age": "x"}, "age: input should be a valid integer, unable to parse"),
        (greet, {"name": "Ada"}, "age: field required"),
        (greet, {}, "name: field required; age: field required"),
        (greet, b'{"name":', "the body is not JSON: Expecting value at line 1, column 9"),
        (greet, [], "input should be an object, got []"),
        (double, {"x": "far"}, "x: expected float, got str"),
        (double, {}, "object missing required field x"),
        (double, b"{'x': 1}", "the body is not JSON: Expecting property name"),
        (same, [1], "expected object, got array"),
        (upper, b"\xff\xfe", "expected UTF-8 text, got another byte at 0"),
        (turned, b"GIF", "The request's body is no picture"),
        (greet, {'{"name": "Ada"}': bytearray()}, "add -H 'Content-Type: application/json'"),
        (
            upper,
            {"a great film": bytearray()},
            "a form, which is what curl -d sends: add -H 'Content-Type: text/plain'",
        ),
        (backwards, {"abc": bytearray()}, "add -H 'Content-Type: application/octet-stream'"),
        (upper, {"a": bytearray(b"1"), "b": bytearray(b"2")}, "expected text as the body, got a form with a, b"),
    ],
)
def test_what_does_not_fit_is_the_clients_fault(target: Any, body: Any, message: str) -> None:
    """400 with the field's name where there is one, and what was seen."""
    with pytest.raises(BadInput) as caught:
        Opening(target).only(body)

    assert message in caught.value.message
    assert caught.value.error_code == 400


@dataclass
class Coloured:
    """With a choice."""

    colour: Literal["red", "green"]


class Strict(BaseModel):
    """Without further fields."""

    model_config = ConfigDict(extra="forbid")


class Box(BaseModel):
    """With four sizes."""

    a: int
    b: int
    c: int
    d: int


@model
def fit(box: Box) -> int:
    """How much goes in."""
    return box.a


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"b": 1, "c": "x", "d": 1}, "a: field required; c: input should be a valid integer, unable to parse string"),
        ({}, "a: field required; b: field required; c: field required (and 1 more)"),
    ],
)
def test_the_first_three_faults_of_a_body_are_named(body: Any, message: str) -> None:
    """So one request shows what all is to be mended, as a rule."""
    with pytest.raises(BadInput) as caught:
        Opening(fit).only(body)

    assert str(caught.value.message).startswith(message)


def test_what_a_client_wrote_is_cut_in_its_message() -> None:
    """Names and values that the libraries repeat whole."""

    @model
    def paint(item: Coloured) -> str:
        return item.colour

    @model
    def strict(item: Strict) -> str:
        return ""

    @model
    def numbers(item: dict[str, int]) -> str:
        return ""

    long = "x" * 100_000
    for target, body in ((paint, {"colour": long}), (strict, {long: 1}), (numbers, {long: long}), (greet, {"name": 1})):
        with pytest.raises(BadInput) as caught:
            Opening(target).only(body)

        assert len(caught.value.message) < 500


def test_mates_of_what_does_not_fit_are_answered() -> None:
    """The error stands in the place of its answer."""
    good, bad = Opening(double).answer({"x": 1}, {"x": None})

    assert good == {"x": 2.0, "y": 0.0}
    assert isinstance(bad, BadInput)


def test_an_exception_is_its_items_alone() -> None:
    """Raised by the author's code, whatever it is; raised again where the item is alone."""

    @model
    def divide(value: dict[str, Any]) -> float:
        return float(1 / value["by"])

    served = Opening(divide)

    good, bad = served.answer({"by": 2}, {"by": 0})

    assert good == 0.5
    assert isinstance(bad, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        served.only({"by": 0})


@pytest.mark.parametrize("is_async", [False, True])
def test_what_an_item_logs_belongs_to_its_request_alone(is_async: bool) -> None:
    """Though others are in the batch, which no line of a single one concerns."""

    def owners() -> str:
        return ",".join(item.id for item in of_this_task.get() or ())

    async def ask_async(text: str) -> str:
        await asyncio.sleep(0)
        return owners()

    def ask(text: str) -> str:
        return owners()

    served = Opening(model(ask_async if is_async else ask))

    assert served.answer(b"1", b"2", b"3") == [b"id-0", b"id-1", b"id-2"]
    assert owners() == ""


# ------------------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize(
    ("target", "body", "answer"),
    [
        (greet, {"name": "Ada", "age": 36}, b"Ada, 36"),
        (greet, {"name": bytearray(b"Ada"), "age": bytearray(b"36")}, b"Ada, 36"),
        (greet, b'\xef\xbb\xbf{"name": "Ada", "age": 36}', b"Ada, 36"),
        (double, {"x": 1.5, "y": 2}, {"x": 3.0, "y": 4.0}),
        (double, b'\xef\xbb\xbf{"x": 1.5}', {"x": 3.0, "y": 0.0}),
        (double, {"x": bytearray(b"1.5")}, {"x": 3.0, "y": 0.0}),
        (double, b'{"x": Infinity}', {"x": float("inf"), "y": 0.0}),
        (same, {"a": [1, None]}, {"a": [1, None]}),
        (upper, b"hello", b"HELLO"),
        (upper, {"file": bytearray(b"hello")}, b"HELLO"),
        (backwards, b"abc", b"cba"),
    ],
)
def test_an_item_is_read_by_its_annotation(target: Any, body: Any, answer: Any) -> None:
    """From a raw body, or from a form."""
    assert Opening(target).only(body) == answer


def ask_upper(body: bytes, content_type: str | None, name: str = "body") -> Any:
    """What the model of text answers to a value of this type."""
    return Opening(upper).answer({name: bytearray(body)}, items=[FakeItem(parts=[(name, content_type)])])[0]


@pytest.mark.parametrize(
    ("body", "content_type", "answer"),
    [
        (b'{"text": "a"}', None, b'{"TEXT": "A"}'),
        (b'{"text": "a"}', "text/plain; charset=utf-8", b'{"TEXT": "A"}'),
        (b'"a"', "text/markdown", b'"A"'),
        (b'"a"', "application/octet-stream", b'"A"'),
        (b'"a"', "application/json", b"A"),
        (b'{"text": "\\u00e4"}', "Application/JSON ; charset=utf-8", "Ä".encode()),
        (b'""', "application/json", b""),
        (b"", "text/plain", b""),
    ],
)
def test_text_is_read_by_its_content_type(body: bytes, content_type: str | None, answer: bytes) -> None:
    """JSON says it alone, or in an object by the parameter's name; a file of a form has a type, too."""
    assert ask_upper(body, content_type) == ask_upper(body, content_type, "file" if body else "data") == answer


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"abc", "application/json", "the body is not JSON: Expecting value at line 1, column 1"),
        (b"", "application/json", "expected JSON, got an empty body"),
        (b"[1]", "application/json", 'expected a JSON text or {"text": text}, got a list'),
        (b"{}", "application/json", "text: is missing, expected a text"),
        (b'{"text": 1}', "application/json", "text: expected a text, got a number"),
        (b'{"text": "a", "other": 1}', "application/json", 'other: there is no such field; expected a JSON text or {"'),
        (
            b"a",
            "application/xml",
            'expected text/plain, or application/json with a JSON text or {"text": text}, got app',
        ),
        (b"a", "image/" + "x" * 1000, "xxx…"),
    ],
)
def test_text_in_another_form_is_the_clients_fault(body: bytes, content_type: str, message: str) -> None:
    """With what is expected, and what was seen."""
    with pytest.raises(BadInput) as caught:
        ask_upper(body, content_type)

    assert message in caught.value.message


def test_bytes_are_the_body_whatever_its_type() -> None:
    """JSON, too."""
    served = Opening(backwards)

    answers = served.answer(b'"ab"', items=[FakeItem(parts=[("body", "application/json")])])

    assert answers == [b'"ba"']


def test_a_picture_comes_and_goes_as_a_file() -> None:
    """PNG with its content type."""
    picture = Image.new("RGB", (2, 1))
    picture.putpixel((0, 0), (255, 0, 0))
    file = io.BytesIO()
    picture.save(file, "PNG")
    served = Opening(turned)

    answer = served.only(file.getvalue())

    assert Image.open(io.BytesIO(answer)).getpixel((1, 0)) == (255, 0, 0)
    assert served.context.get_response_content_type(0) == "image/png"


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ({"a": np.float32(1.5), "b": np.arange(2)}, {"a": 1.5, "b": [0, 1]}),
        ([Person(name="Ada", age=36)], [{"name": "Ada", "age": 36}]),
        (Person(name="Ada", age=36), {"name": "Ada", "age": 36}),
        (Point(1, 2), {"x": 1, "y": 2}),
        (7, 7),
        (None, None),
    ],
)
def test_an_answer_is_written_by_its_type(value: Any, answer: Any) -> None:
    """Where nothing is annotated."""

    @model
    def give(item: dict[str, Any]):  # type: ignore[no-untyped-def]
        return value

    assert Opening(give).only({}) == answer


def test_an_answer_is_checked_by_its_annotation() -> None:
    """A dict becomes the model; what does not fit is the author's fault."""

    @model
    def person(item: dict[str, Any]) -> Person:
        return item  # type: ignore[return-value]

    served = Opening(person)

    assert served.only({"name": "Ada", "age": "36"}) == {"name": "Ada", "age": 36}
    with pytest.raises(ValueError, match="age") as caught:
        served.only({"name": "Ada"})
    assert not isinstance(caught.value, BadInput)


def test_a_wrong_kind_of_answer_is_said_in_a_sentence() -> None:
    """What was returned, and what is annotated."""

    @model
    def text(item: dict[str, Any]) -> str:
        return b"bytes"  # type: ignore[return-value]

    with pytest.raises(TypeError, match="returned bytes, and is annotated to return str"):
        Opening(text).only({})


def test_the_context_speaks_of_the_one_request() -> None:
    """Its headers in any case, its id, and what is set for its answer."""

    @model
    class Echo:
        def predict(self, item: str, context: ItemContext) -> str:
            context.set_status(201)
            context.set_header("x-seen", context.header("X-Trace") or "")
            context.set_content_type("text/x")
            assert not context.is_cancelled
            assert context.deadline is None
            return f"{context.request_id} {context.model.model_name}"

    served = Opening(Echo)
    served_items = [FakeItem("a"), FakeItem("b", headers=[(b"x-trace", b"7")])]

    answers = served.answer(b"1", b"2", items=served_items)

    assert answers == [b"a m", b"b m"]
    assert served.context.response_of(1) == (201, "", [("x-seen", "7"), ("content-type", "text/x")])


def test_coroutines_of_a_batch_run_side_by_side() -> None:
    """The second may answer while the first waits for it."""
    import asyncio

    @model
    class Meeting:
        def load(self, context: Any) -> None:
            self.met = asyncio.Event()

        async def predict(self, item: str) -> str:
            if item == "first":
                await self.met.wait()
            self.met.set()
            return item

    assert Opening(Meeting).answer(b"first", b"second") == [b"first", b"second"]


# ------------------------------------------------------------------------------------------- what is declared


def test_schemas_are_published() -> None:
    """Of pydantic's models by themselves, of dataclasses by msgspec, without a reference at the top."""
    person, point = Opening(greet).declaration, Opening(double).declaration

    assert person["input"]["schema"]["properties"]["age"] == {"title": "Age", "type": "integer"}
    assert person["output"] == {"type": "text", "contentType": "text/plain"}
    assert point["input"]["schema"]["properties"]["x"] == {"type": "number"}
    assert point["input"]["schema"]["required"] == ["x"]
    assert point["output"]["schema"]["type"] == "object"


def test_the_schema_of_a_text_names_each_form_of_json_that_is_read() -> None:
    """A text alone, and an object with the parameter's name."""
    assert Opening(upper).declaration["input"]["schema"] == {
        "anyOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
                "additionalProperties": False,
            },
        ]
    }


@pytest.mark.parametrize(
    ("target", "kind"), [(upper, "text"), (backwards, "bytes"), (turned, "image"), (same, "json"), (greet, "json")]
)
def test_the_kind_of_item_is_declared(target: Any, kind: str) -> None:
    """In describe a client reads what to send."""
    assert Opening(target).declaration["input"]["type"] == kind


def test_a_typed_dict_is_checked() -> None:
    """Its keys and their types."""

    @model
    def deep(options: Options) -> int:
        return options["depth"]

    served = Opening(deep)

    assert served.only({"depth": 3}) == 3
    with pytest.raises(BadInput, match="depth: expected int, got str"):
        served.only({"depth": "x"})


class Unreadable:
    """A class that no JSON is read into."""


def _unknown(item: Missing) -> str: ...  # type: ignore[name-defined] # noqa: F821


def _unreadable(item: list[Unreadable]) -> str: ...  # type: ignore[empty-body]


def _two(item: str, other: str) -> str: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_unknown, "An annotation of _unknown cannot be resolved: name 'Missing' is not defined"),
        (_unreadable, "take a pydantic model, a dataclass, dict, bytes, str, or PIL.Image.Image"),
        (_two, "must take one input, beside context, and takes item, other"),
        (lambda: 1, "must take one input, beside context, and takes none"),
    ],
)
def test_a_signature_that_cannot_be_served_is_refused(function: Any, words: str) -> None:
    """At load, in a sentence."""
    with pytest.raises(DeclarationError) as caught:
        Opening(model(function))

    assert words in str(caught.value)


class _NoContext:
    def load(self) -> None: ...

    def predict(self, item: str) -> str: ...  # type: ignore[empty-body]


class _TooMuch(_NoContext):
    def load(self, context: Any, device: str) -> None: ...  # type: ignore[override]


class _Static(_NoContext):
    @staticmethod
    def load(context: Any, device: str = "cpu") -> None: ...  # type: ignore[override]


class _OfClass(_NoContext):
    @classmethod
    def load(cls, *given: Any) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (_NoContext, "_NoContext.load needs a parameter for the context: def load(self, context)."),
        (_TooMuch, "_TooMuch.load gets the context alone, and needs device, too."),
    ],
)
def test_a_load_that_cannot_be_called_is_refused(target: Any, words: str) -> None:
    """Before an object is made, so that `marserve archive` says it, too."""
    with pytest.raises(DeclarationError) as caught:
        declare(Definition(target))

    assert str(caught.value) == words


def test_a_load_may_be_of_the_class_or_static() -> None:
    """Whatever can be called with the context."""
    assert [declare(Definition(each)).output for each in (_Static, _OfClass)]


def test_only_classes_and_functions_are_marked() -> None:
    """A class needs a predict."""
    with pytest.raises(DeclarationError, match="The class Empty has no method predict"):

        @model
        class Empty:
            pass

    with pytest.raises(DeclarationError, match="marks a class or a function, not int"):
        model(3)  # type: ignore[call-overload]
    with pytest.raises(DeclarationError, match="outputs is given without inputs"):
        model(outputs={})
    with pytest.raises(DeclarationError, match="The name '' is no text"):
        model(name="")
