"""The envelope `kservev2`: tensors in, tensors out."""

from __future__ import annotations

import json
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from marserve_handlers.envelopes.kserve_v2 import KServev2Envelope, _to_datatype, _to_dtype  # noqa: E402
from marserve_handlers.errors import BadInput, PredictionException  # noqa: E402
from support.model_context import FakeItem, make_context  # noqa: E402


def echo(data: Any, context: Any) -> Any:
    """A handler: what it was given."""
    return data


def ask(*inputs: dict[str, Any], handle: Any = echo, request_id: str | None = "r") -> dict[str, Any]:
    """The envelope's answer to one request with these inputs."""
    context = make_context()
    context.manifest = {"model": {"modelName": "m", "modelVersion": "2.0"}}
    context.begin_batch([FakeItem("server-id")])
    body = {"inputs": list(inputs)} | ({"id": request_id} if request_id else {})
    (answer,) = KServev2Envelope(handle).handle([{"body": body}], context)
    return dict(answer)


def tensor(data: Any, shape: Any = None, datatype: str = "FP32", name: str = "x") -> dict[str, Any]:
    """An input."""
    found = {"name": name, "datatype": datatype, "data": data}
    return found if shape is None else found | {"shape": shape}


def test_an_answer_names_model_version_and_inputs() -> None:
    """From the manifest; the id is the request's."""
    answer = ask(tensor([1, 2], [2], name="a"), tensor([3], [1], name="b"), handle=lambda data, context: [3, 2.5])

    assert answer == {
        "id": "r",
        "model_name": "m",
        "model_version": "2.0",
        "outputs": [
            {"name": "a", "datatype": "INT64", "data": [3], "shape": [1]},
            {"name": "b", "datatype": "FP64", "data": [2.5], "shape": [1]},
        ],
    }


def test_without_an_id_it_is_the_servers() -> None:
    """The one that travels in `x-request-id`, too."""
    assert ask(tensor([1], [1]), request_id=None)["id"] == "server-id"


@pytest.mark.parametrize(
    ("data", "shape", "seen"),
    [
        ([1, 2, 3, 4], [2, 2], [[1, 2], [3, 4]]),
        ([[1, 2], [3, 4]], [4], [1, 2, 3, 4]),
        ([1, 2, 3, 4], [1, 2, 2], [[[1, 2], [3, 4]]]),
        ([1, 2], None, [1, 2]),
        ([], [0], []),
    ],
)
def test_data_is_reshaped(data: Any, shape: Any, seen: Any) -> None:
    """To nested lists; the values keep their type."""
    inputs: list[Any] = []

    ask(tensor(data, shape), handle=lambda data, context: inputs.extend(data) or [0])

    assert inputs == [seen]


def test_of_bytes_the_first_element_is_taken() -> None:
    """As TorchServe does."""
    assert ask(tensor(["text"], [1], "BYTES"))["outputs"][0]["data"] == ["text"]


def test_an_output_keeps_its_shape_beside_flat_data() -> None:
    """As the protocol has it; dicts and ragged lists are BYTES."""
    outputs = [[1.5, 2.5], [3.5, 4.5]]
    (output,) = ask(tensor([1], [1]), handle=lambda data, context: [outputs])["outputs"]
    (ragged,) = ask(tensor([1], [1]), handle=lambda data, context: [[[1], [2, 3]]])["outputs"]

    assert (output["shape"], output["data"]) == ([2, 2], [1.5, 2.5, 3.5, 4.5])
    assert (ragged["datatype"], ragged["data"]) == ("BYTES", [[1], [2, 3]])


@pytest.mark.parametrize(
    "inputs",
    [
        [tensor([1, 2, 3], [2, 2])],
        [tensor([1], "2")],
        [tensor([1], [1], "FLOAT")],
        [{"name": "x", "shape": [1], "datatype": "FP32"}],
        ["x"],
    ],
)
def test_what_is_no_tensor_is_the_clients_fault(inputs: list[Any]) -> None:
    """400, with a sentence that names the input."""
    with pytest.raises(PredictionException) as caught:
        ask(*inputs)

    assert caught.value.error_code == 400


def test_requests_share_a_batch() -> None:
    """Each gets the answers to its own inputs."""
    context = make_context()
    context.begin_batch([FakeItem("a"), FakeItem("b")])
    rows = [{"body": {"inputs": [tensor([1], [1]), tensor([2], [1])]}}, {"body": {"inputs": [tensor([3], [1])]}}]

    first, second = KServev2Envelope(echo).handle(rows, context)

    assert [output["data"] for output in first["outputs"]] == [[1], [2]]
    assert [output["data"] for output in second["outputs"]] == [[3]]
    assert (first["id"], second["id"]) == ("a", "b")


def test_types_have_two_names() -> None:
    """The protocol's and numpy's; text is BYTES."""
    assert _to_dtype("FP16") == np.float16
    assert [_to_datatype(np.dtype(name)) for name in ("bool", "uint8", "<U3", "S2", "O")] == [
        "BOOL",
        "UINT8",
        "BYTES",
        "BYTES",
        "BYTES",
    ]


def ask_raw(head: dict[str, Any], values: bytes, *, length: int | None = None) -> Any:
    """The envelope's answer to a request whose tensors are behind its JSON."""
    text = json.dumps(head).encode()
    context = make_context()
    counted = str(len(text) if length is None else length).encode()
    headers = [(b"inference-header-content-length", counted)]
    context.begin_batch([FakeItem("server-id", headers, [("open_inference", "v2")])])
    return KServev2Envelope(echo).handle([{"body": text + values}], context)[0]["outputs"]


def raw(datatype: str, shape: list[int], values: bytes, name: str = "x") -> dict[str, Any]:
    """An input whose values are behind the JSON."""
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(values)}}


def test_raw_tensors_are_values_as_those_of_json_are() -> None:
    """As tritonclient sends them unless it is told otherwise; texts are texts, other bytes are bytes."""
    text, odd, numbers = b"\x03\0\0\0a\xc3\xa4", b"\x01\0\0\0\xff", np.array([[1, 2]], "float32").tobytes()
    given = [raw("BYTES", [1], text, "a"), raw("FP32", [1, 2], numbers, "b"), raw("BYTES", [1], odd, "c")]

    outputs = ask_raw({"inputs": given}, text + numbers + odd)

    assert [(each["name"], each["data"]) for each in outputs] == [("a", ["aä"]), ("b", [1.0, 2.0]), ("c", ["�"])]


@pytest.mark.parametrize(
    ("head", "values", "words"),
    [
        ({"inputs": [raw("FP32", [2], b"\0" * 4)]}, b"\0" * 4, "x: FP32 .2.: 4 bytes came, and its shape takes 8"),
        ({"inputs": [raw("FP32", [1], b"\0" * 8)]}, b"\0" * 4, "x: has a binary_data_size of 8, and 4 bytes are left"),
        ({"inputs": [raw("FP32", [1], b"\0" * 4)]}, b"\0" * 8, "8 bytes came behind the JSON"),
        ({"inputs": []}, b"", "inputs: expected a list of one tensor at least"),
    ],
)
def test_raw_tensors_that_do_not_fit_are_refused_by_name(head: Any, values: bytes, words: str) -> None:
    """Before the handler sees them."""
    with pytest.raises(BadInput, match=words):
        ask_raw(head, values)
