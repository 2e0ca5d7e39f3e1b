"""Tests for requests of the Open Inference Protocol to models of one text, of bytes or of a picture."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from marserve_handlers import BadInput, model
from support.declared_models import Opening
from support.model_context import FakeItem

MARKED = [("open_inference", "v2")]
CALLS: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    """Nothing was called."""
    CALLS.clear()


@model
def upper(text: str) -> str:
    """In capitals; some texts fail."""
    CALLS.append(text)
    if text == "bad":
        raise BadInput("it is bad")
    return text.upper()


@model
def turned(data: bytes) -> bytes:
    """Back to front."""
    return data[::-1]


@model
def counted(text: str) -> dict[str, int]:
    """An answer of JSON."""
    return {"length": len(text)}


@model
def size(picture: Image.Image) -> Image.Image:
    """A picture of half the size."""
    return picture.resize((picture.width // 2, picture.height // 2))


@model
async def slow(text: str, context: Any) -> str:
    """All at once."""
    CALLS.append(text)
    await asyncio.sleep(0)
    if text == "bad":
        raise BadInput("it is bad")
    return f"{context.request_id} {text} {len(CALLS)}"


@model
def words(text: str) -> Iterator[str]:
    """A stream."""
    yield from text.split()


def texts(*data: str, **members: Any) -> dict[str, Any]:
    """A tensor of texts, as MLServer's codec of strings has it."""
    return {"name": "text", "datatype": "BYTES", "shape": [len(data), 1], "data": list(data), **members}


def infer(*inputs: dict[str, Any], **members: Any) -> dict[str, Any]:
    """A request of the protocol."""
    return {"inputs": list(inputs), **members}


def marked(length: int | None = None, **more: Any) -> FakeItem:
    """A request that came by the protocol's route."""
    headers = [] if length is None else [(b"Inference-Header-Content-Length", str(length).encode())]
    return FakeItem("id-0", headers, list(MARKED), **more)


def ask(target: Any, request: Any, **more: Any) -> Any:
    """The answer to a request that comes alone."""
    return Opening(target).answer(request, items=[marked(**more)])[0]


BASE64 = {"content_type": "base64"}


@pytest.mark.parametrize(
    ("target", "inputs", "members", "message"),
    [
        (upper, [texts("a"), texts("b", name="more")], {}, "inputs: 2 tensors came, and the model takes one"),
        (upper, [texts(datatype="FP32", shape=[1], data=[1])], {}, "text: expected BYTES [batch], got FP32"),
        (upper, [texts("a", "b", shape=[1, 2])], {}, "text: expected BYTES [batch] or [batch, 1], got [1, 2]"),
        (upper, [texts("a", shape=[])], {}, "text: expected BYTES [batch] or [batch, 1], got []"),
        (upper, [texts(shape=[0])], {}, "text: has no element"),
        (upper, [texts(*"a" * 17)], {}, "text: has 17 elements, more than maxRows, 16"),
        (upper, [texts("a", "Zg", parameters=BASE64)], {}, "text[0]: is no base64, which its content_type says"),
        (upper, [texts("Zg==", "/w==", parameters=BASE64)], {}, "text[1]: expected UTF-8 text, got another byte at 0"),
        (size, [texts("no picture")], {}, "text[0]: The request's body is no picture"),
        (upper, [texts("a")], {"outputs": [{"name": "y"}]}, "the output 'y' is asked for; the model gives output"),
        (
            upper,
            [texts("a")],
            {"outputs": [{"name": "output", "parameters": {"classification": 1}}]},
            "output: is no tensor of scores",
        ),
    ],
)
def test_what_does_not_fit_is_the_clients_fault_before_anything_is_run(
    target: Any, inputs: list[Any], members: dict[str, Any], message: str
) -> None:
    """With the name of the tensor, and the place of the element."""
    with pytest.raises(BadInput) as caught:
        ask(target, infer(*inputs, **members))

    assert message in str(caught.value.message)
    assert not CALLS


def test_each_element_is_a_call_and_the_answers_have_the_shape_of_what_came() -> None:
    """Whatever the tensor is called."""
    column = ask(upper, infer(texts("a", "ä"), id="7"))
    row = ask(upper, infer(texts("a", shape=[1], name="x")))

    assert column["id"] == "7"
    assert column["outputs"] == [{"name": "output", "datatype": "BYTES", "shape": [2, 1], "data": ["A", "Ä"]}]
    assert row["outputs"][0]["shape"] == [1]


def test_an_element_that_fails_fails_its_request_alone() -> None:
    """And others of the batch are answered, those of other routes too."""
    opened = Opening(upper)

    bad, good, plain = opened.answer(
        infer(texts("a", "bad", "c")), infer(texts("d")), b"e", items=[marked(), marked(), FakeItem("plain")]
    )

    assert str(bad.message) == "it is bad"
    assert good["outputs"][0]["data"] == ["D"]
    assert plain == b"E"
    assert CALLS == ["a", "bad", "d", "e"]


def test_elements_of_a_coroutine_run_side_by_side() -> None:
    """One that fails ends the others; each knows its request."""
    answer = ask(slow, infer(texts("a", "b")))

    assert answer["outputs"][0]["data"] == ["id-0 a 2", "id-0 b 2"]
    with pytest.raises(BadInput, match="it is bad"):
        ask(slow, infer(texts("bad", "b")))


def test_nothing_more_is_run_of_a_request_whose_time_is_over() -> None:
    """The client has gone."""
    assert ask(upper, infer(texts("a", "b")), deadline=0.0) == b""
    assert CALLS == ["a"]


def test_bytes_are_base64_in_json_and_as_they_are_in_a_binary_tensor() -> None:
    """Unless the client asks for base64 there, too, or sent it."""
    raw = b"\xff\x00"
    element = len(raw).to_bytes(4, "little") + raw
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(element)}}

    def binary(**parameters: Any) -> tuple[Any, bytes]:
        output = {"name": "output", "parameters": {"binary_data": True, **parameters}}
        text = json.dumps(infer(tensor, outputs=[output])).encode()
        opened = Opening(turned)
        [body] = opened.answer(text + element, items=[marked(len(text))])
        length = dict(opened.context.response_of(0)[2])["Inference-Header-Content-Length"]
        return json.loads(body[: int(length)])["outputs"][0], body[int(length) + 4 :]

    in_json = ask(turned, infer(texts(base64.b64encode(raw).decode(), parameters=BASE64)))["outputs"][0]
    of_text = ask(turned, infer(texts("ab")))["outputs"][0]

    assert (in_json["data"], in_json["parameters"]) == ([base64.b64encode(raw[::-1]).decode()], BASE64)
    assert (of_text["data"], of_text["parameters"]) == ([base64.b64encode(b"ba").decode()], BASE64)
    described, values = binary()
    assert (described["parameters"], values) == ({"binary_data_size": 6}, raw[::-1])
    described, values = binary(content_type="base64")
    assert (described["parameters"], values) == ({**BASE64, "binary_data_size": 8}, base64.b64encode(raw[::-1]))


def test_pictures_come_and_go_as_base64() -> None:
    """As PNG."""
    file = io.BytesIO()
    Image.new("L", (8, 4)).save(file, "PNG")

    answer = ask(size, infer(texts(base64.b64encode(file.getvalue()).decode(), parameters=BASE64)))

    [value] = answer["outputs"][0]["data"]
    assert Image.open(io.BytesIO(base64.b64decode(value))).size == (4, 2)


def test_answers_say_what_they_are_to_clients_that_speak_of_content_types() -> None:
    """Texts, JSON and what was asked for; of a frame of pandas JSON has a word of its own."""

    def of(target: Any, **members: Any) -> tuple[Any, Any, Any]:
        answer = ask(target, infer(texts("ab", parameters=members.pop("of_tensor", {})), **members))
        [output] = answer["outputs"]
        return answer.get("parameters"), output.get("parameters"), output["data"]

    str_, json_, frame, pd_json = ({"content_type": each} for each in ("str", "json", "pd", "pd_json"))
    when = {"content_type": "datetime"}
    asked = [{"name": "output", "parameters": when}]
    assert of(upper) == (None, None, ["AB"])
    assert of(upper, of_tensor=str_) == (None, str_, ["AB"])
    assert of(upper, parameters=str_) == (str_, str_, ["AB"])
    assert of(upper, of_tensor=when, outputs=asked) == (None, when, ["AB"])
    assert of(counted) == (None, None, ['{"length":2}'])
    assert of(counted, of_tensor=str_) == (None, json_, ['{"length":2}'])
    assert of(counted, parameters=frame) == (frame, pd_json, ['{"length":2}'])


def test_a_stream_and_an_item_of_json_take_the_body_as_it_is() -> None:
    """The protocol's document is theirs to read."""

    @model
    def same(value: dict[str, Any]) -> Any:
        return value

    assert ask(same, infer(texts("a")))["inputs"][0]["data"] == ["a"]
    with pytest.raises(BadInput, match="inputs: there is no such field"):
        Opening(words).answer(infer(texts("a")), items=[FakeItem("a", [], MARKED, [("body", "application/json")])])
