"""Tests for requests of the Open Inference Protocol to a model of named tensors, beside others in their batch."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest

from marserve_handlers import BadInput, Tensor, model
from support.declared_models import Opening
from support.model_context import FakeItem

MARKED = [("open_inference", "v2")]


@model(
    inputs={"x": Tensor("float32", ["batch", 2]), "n": Tensor("int64", ["batch"], optional=True)},
    outputs={"sums": Tensor("float32", ["batch"]), "scores": Tensor("float32", ["batch", 2])},
)
class Sums:
    """Adds the two numbers of each row."""

    def load(self, context: Any) -> None:
        """Nothing was called."""
        CALLS.clear()

    def predict(self, x: Any, n: Any) -> Any:
        """Sums, and what came."""
        CALLS.append(len(x))
        return {"sums": x.sum(axis=1) + (0 if n is None else n), "scores": x}


CALLS: list[int] = []


def infer(*inputs: dict[str, Any], **members: Any) -> dict[str, Any]:
    """A request of the protocol."""
    return {"inputs": list(inputs), **members}


def x(*rows: list[float]) -> dict[str, Any]:
    """The input."""
    return {"name": "x", "datatype": "FP32", "shape": [len(rows), len(rows[0])], "data": rows}


def marked(count: int = 1, length: int | None = None) -> list[FakeItem]:
    """Requests that came by the protocol's route."""
    headers = [] if length is None else [(b"Inference-Header-Content-Length", str(length).encode())]
    return [FakeItem(f"id-{place}", headers, list(MARKED)) for place in range(count)]


def packed_items(encoding: str, length: int | None = None) -> list[FakeItem]:
    """One request whose body came compressed, as the server marks it."""
    [item] = marked(length=length)
    item.server_headers.append(("open_inference_packed_body", f"{encoding} 10000"))
    item.headers.append((b"Content-Encoding", encoding.encode()))
    return [item]


IN_MEMORY = {"shared_memory_region": "r", "shared_memory_byte_size": 8}


def x_of_memory() -> dict[str, Any]:
    """The input, in shared memory."""
    return {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": IN_MEMORY}


def test_what_the_model_does_not_take_is_said_with_its_name() -> None:
    """The batch axis belongs to the tensor; an output that is not there is found before the model is run."""
    opened = Opening(Sums)

    def fault(*inputs: dict[str, Any], **members: Any) -> str:
        answer = opened.answer(infer(*inputs, **members), {"x": [1, 2]}, items=[*marked(), FakeItem("plain")])[0]
        assert isinstance(answer, BadInput)
        return str(answer.message)

    flat = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}
    words = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]}
    assert fault(flat) == "x: expected float32 [batch, 2], got [2], which lacks the batch axis"
    assert fault(words) == "x: expected float32 [batch, 2], got BYTES"
    assert fault({**flat, "name": "y"}).startswith("y: there is no such input")
    assert fault(x([1, 2]), outputs=[{"name": "z"}]) == "the output 'z' is asked for; the model gives sums, scores"
    assert CALLS == [1, 1, 1, 1]


def test_a_compressed_body_is_answered_as_it_would_be_without() -> None:
    """With raw tensors behind its JSON, too; what does not fit is refused as ever."""
    head = json.dumps(infer({"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}))
    raw = head.encode() + np.array([1, 2], "<f4").tobytes()
    [plain] = packed_items("gzip")
    [with_tensors] = packed_items("deflate", length=len(head))

    answers = Opening(Sums).answer(
        gzip.compress(json.dumps(infer(x([1, 2]))).encode()),
        zlib.compress(raw),
        gzip.compress(b"{}"),
        items=[plain, with_tensors, plain],
    )

    assert [each["outputs"][0]["data"] for each in answers[:2]] == [[3], [3]]
    assert str(answers[2].message).startswith("inputs: expected a list")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"parameters": {"priority": 1}}, "parameters.priority: the server reads it in no compressed body"),
        ({"inputs": [{**x_of_memory()}]}, "x: has shared_memory_region, and this server takes no shared memory for it"),
        ({"outputs": [{"name": "sums", "parameters": IN_MEMORY}]}, "sums: has shared_memory_region"),
    ],
)
def test_what_only_the_server_can_read_is_refused_in_a_compressed_body(members: dict[str, Any], words: str) -> None:
    """By its name, before the model is called."""
    opened = Opening(Sums)

    packed = gzip.compress(json.dumps({**infer(x([1, 2])), **members}).encode())
    refused, plain = opened.answer(packed, {"x": [1, 2]}, items=[*packed_items("gzip"), FakeItem("plain")])

    assert isinstance(refused, BadInput)
    assert str(refused.message).startswith(words)
    assert plain["sums"] == 3
    assert CALLS == [1]


def test_a_body_is_refused_whose_compression_the_server_did_not_look_at() -> None:
    """Not as a body of a wrong length."""
    items = [
        FakeItem("a", [(b"Content-Encoding", b"gzip")], MARKED),
        FakeItem("b", [(b"content-encoding", b"identity")], MARKED),
    ]

    packed, plain = Opening(Sums).answer(b"\x1f\x8b", infer(x([1, 2])), items=items)

    assert str(packed.message) == "the body came with Content-Encoding: 'gzip'; send it as it is"
    assert plain["outputs"][0]["data"] == [3]


def test_requests_share_a_batch_and_each_has_its_rows() -> None:
    """One of two rows, one of one: one call of three."""
    opened = Opening(Sums)

    answers = opened.answer(
        infer(x([1, 2], [3, 4]), id="a"), infer(x([5, 6]), outputs=[{"name": "sums"}]), items=marked(2)
    )

    assert [each["outputs"] for each in answers] == [
        [
            {"name": "sums", "datatype": "FP32", "shape": [2], "data": [3, 7]},
            {"name": "scores", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]},
        ],
        [{"name": "sums", "datatype": "FP32", "shape": [1], "data": [11]}],
    ]
    assert answers[0]["id"] == "a"
    assert answers[0]["model_name"] == "m"
    assert CALLS == [3]


def test_a_request_of_another_form_shares_the_batch() -> None:
    """And one that does not fit fails alone."""
    opened = Opening(Sums)
    items = [*marked(2), FakeItem("plain")]

    first, second, third = opened.answer(infer(x([1, 2])), infer(x([1, 2, 3])), {"x": [5, 6]}, items=items)

    assert first["outputs"][0]["data"] == [3]
    assert isinstance(second, BadInput)
    assert third == {"sums": 11, "scores": [5, 6]}


def test_raw_tensors_come_and_go() -> None:
    """The answer says how much of it is JSON."""
    text = json.dumps(
        infer(
            {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
            outputs=[{"name": "scores", "parameters": {"binary_data": True}}],
        )
    ).encode()
    opened = Opening(Sums)
    values = np.array([1, 2], "<f4").tobytes()

    (answer,) = opened.answer(text + values, items=marked(length=len(text)))

    headers = opened.context.get_response_headers(0)
    assert answer[int(headers["Inference-Header-Content-Length"]) :] == values
    assert headers["content-type"] == "application/octet-stream"


def test_a_list_of_mlservers_clients_is_taken_for_a_tensor_of_one_axis() -> None:
    """`[n, 1]` for `[n]`; other shapes are refused as ever."""
    opened = Opening(Sums)
    column = {"name": "n", "datatype": "INT64", "shape": [2, 1], "data": [10, 20], "parameters": {"content_type": "np"}}

    good, bad = opened.answer(
        infer(x([1, 2], [3, 4]), column), infer(x([1, 2]), {**column, "shape": [1, 2]}), items=marked(2)
    )

    assert good["outputs"][0] == {
        "name": "sums",
        "datatype": "FP32",
        "shape": [2],
        "data": [13, 27],
        "parameters": {"content_type": "np"},
    }
    assert str(bad.message) == "n: expected int64 [], got [1, 2]"
