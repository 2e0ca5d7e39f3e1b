"""Classes of LitServe's LitAPI as handlers: the order of calls, batches, streams, coroutines, what clients get."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from marserve_handlers.context import Context
from marserve_handlers.errors import BadInput
from marserve_handlers.lit_api import LitApiHandler, is_lit_api
from support.lit_api import LitAPI
from support.model_context import FakeItem, make_context

JSON = [(b"content-type", b"application/json")]


class Square(LitAPI):  # type: ignore[misc, valid-type]  # made by exec
    """A number in, its square out."""

    def setup(self, device: str) -> None:
        """Remember where."""
        self.where = device

    def decode_request(self, request: dict[str, Any], context: dict[str, Any]) -> float:
        """Read the number, and note the request."""
        context["asked"] = request["input"]
        return float(request["input"])

    def predict(self, x: float) -> float:
        """Square it; 13 is refused as FastAPI's users do."""
        if x == 13:
            raise Unlucky
        return x**2

    def encode_response(self, output: float, context: dict[str, Any]) -> dict[str, Any]:
        """Say it with what was asked."""
        return {"output": output, "asked": context["asked"], "device": self.where}


class Unlucky(Exception):
    """As FastAPI's HTTPException."""

    status_code, detail, headers = 418, "unlucky", {"x-why": "13"}


class Doubles(LitAPI):  # type: ignore[misc, valid-type]  # made by exec
    """Batches of numbers."""

    def decode_request(self, request: dict[str, Any]) -> float:
        """Read the number."""
        return float(request["input"])

    def batch(self, inputs: list[float]) -> tuple[float, ...]:
        """Note how many came together."""
        self.sizes = [*getattr(self, "sizes", []), len(inputs)]
        return tuple(inputs)

    def predict(self, batch: tuple[float, ...]) -> list[float]:
        """Double them; too few for a batch that has a 7."""
        return [2 * each for each in batch if each != 7]


class Words(LitAPI):  # type: ignore[misc, valid-type]  # made by exec
    """Streams words."""

    def predict(self, request: Any) -> Any:
        """One word at a time; of a batch one of each."""
        if isinstance(request, list):
            yield from zip(*(each["text"].split() for each in request), strict=True)
        else:
            yield from request["text"].split()

    def encode_response(self, output: Any) -> Any:
        """As dicts."""
        for word in output:
            yield [{"word": each} for each in word] if isinstance(word, list) else {"word": word}


class Later(LitAPI):  # type: ignore[misc, valid-type]  # made by exec
    """Coroutines: each waits until all have begun."""

    async def predict(self, request: dict[str, Any]) -> int:
        """Answer when three are there."""
        self.begun = getattr(self, "begun", 0) + 1
        while self.begun < 3:
            await asyncio.sleep(0)
        return int(request["input"]) + 1


def opened(api: type, server: dict[str, Any] | None = None, **keywords: Any) -> tuple[LitApiHandler, Context]:
    """A handler that is ready, and its context."""
    handler, context = LitApiHandler(api, (), keywords, server), make_context()
    handler.initialize(context)
    return handler, context


def ask(context: Context, *values: Any, headers: Any = JSON) -> list[dict[str, Any]]:
    """The rows of requests with these bodies."""
    context.begin_batch(
        [FakeItem(f"id-{n}", headers, parts=[("body", "application/json")]) for n in range(len(values))]
    )
    return [{"body": bytearray(value if isinstance(value, bytes) else json.dumps(value).encode())} for value in values]


def test_each_request_goes_through_decode_predict_and_encode() -> None:
    """With the context of its own that methods ask for, and the answer as FastAPI writes it."""
    handler, context = opened(Square)

    answers = handler.handle(ask(context, {"input": 3}), context)

    assert answers == [b'{"output":9.0,"asked":3,"device":"cpu"}']
    assert context.get_response_content_type(0) == "application/json"
    assert handler.api.is_prepared


def test_errors_are_of_their_request_alone() -> None:
    """Of an HTTPException its status, detail and headers; a body that is not JSON is the client's fault."""
    handler, context = opened(Square)

    good, unlucky, missing, broken = handler.handle(ask(context, {"input": 2}, {"input": 13}, {}, b"{no json"), context)

    assert json.loads(good)["output"] == 4
    assert json.loads(unlucky) == {"detail": "unlucky"}
    assert context.response_of(1)[0] == 418
    assert context.get_response_headers(1)["x-why"] == "13"
    assert isinstance(missing, KeyError)
    assert isinstance(broken, BadInput)
    assert "the body is not JSON: " in str(broken)


def test_a_batch_is_predicted_at_once_without_the_requests_that_do_not_decode() -> None:
    """The old place of `max_batch_size`, LitServer's arguments, counts too."""
    handler, context = opened(Doubles, {"max_batch_size": 4})

    answers = handler.handle(ask(context, {"input": 1}, {"wrong": 1}, {"input": 3}), context)

    assert (answers[0], answers[2]) == (b"2.0", b"6.0")
    assert isinstance(answers[1], KeyError)
    assert handler.api.sizes == [2]
    with pytest.raises(ValueError, match="gave 1 outputs for 2 inputs"):
        handler.handle(ask(context, {"input": 7}, {"input": 3}), context)


@pytest.mark.parametrize("size", [1, 4])
def test_streams_send_pieces_as_they_are_made(size: int) -> None:
    """Each request its own, those of a batching API side by side."""
    handler, context = opened(Words, stream=True, max_batch_size=size)
    rows, sent = ask(context, {"text": "a b"}, {"text": "c d"}), []
    context.send_pieces = sent.append

    answers = handler.handle(rows, context)

    assert sent == [['{"word": "a"}\n', '{"word": "c"}\n'], ['{"word": "b"}\n', '{"word": "d"}\n']]
    assert answers == [b"", b""]


def test_coroutines_run_side_by_side() -> None:
    """Three that wait for each other have answers."""
    handler, context = opened(Later, enable_async=True)

    answers = handler.handle(ask(context, {"input": 1}, {"input": 2}, {"input": 3}), context)

    assert answers == [b"2", b"3", b"4"]


def test_a_form_is_a_dict_of_its_fields() -> None:
    """Without a content type of its own a field is text."""

    class Form(LitAPI):  # type: ignore[misc, valid-type]  # made by exec
        def predict(self, request: dict[str, Any]) -> str:
            return ",".join(f"{name}={value}" for name, value in request.items())

    handler, context = opened(Form)
    item = FakeItem("id", [(b"Content-Type", b"multipart/form-data; boundary=x")], parts=[("a", None), ("b", None)])
    context.begin_batch([item])

    assert handler.handle([{"a": bytearray(b"1"), "b": bytearray(b"2")}], context) == [b'"a=1,b=2"']


def test_a_spec_is_refused_at_load() -> None:
    """Its routes are LitServe's own."""
    with pytest.raises(ValueError, match="serves predict alone, not the routes of a spec"):
        opened(Square, spec=object())


def test_a_constructor_that_wants_more_says_why() -> None:
    """Only literals of the file are known."""

    class Wants(LitAPI):  # type: ignore[misc, valid-type]  # made by exec
        def __init__(self, weights: str) -> None:
            super().__init__()

    with pytest.raises(TypeError) as refusal:
        LitApiHandler(Wants)

    assert "in literals" in refusal.value.__notes__[0]


def test_only_classes_of_litserves_api_are_found() -> None:
    """By the base's name and package; nothing is imported for it."""
    assert is_lit_api(Square)
    assert not is_lit_api(LitAPI)
    assert not is_lit_api(Square())
    assert not is_lit_api(Unlucky)
