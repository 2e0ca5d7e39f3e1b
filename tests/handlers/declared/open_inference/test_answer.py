"""Tests for answers of the Open Inference Protocol."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from marserve_handlers import BadInput
from marserve_handlers.declared.arrays import Array
from marserve_handlers.declared.open_inference.answer import check_asked, classify, write_answer
from marserve_handlers.declared.open_inference.datatypes import as_objects, from_raw, to_raw
from marserve_handlers.declared.open_inference.request import AskedOutput, InferRequest

SCORES = np.array([[0.25, 0.5], [1, 0]], np.float32)


def asking(identity: str = "") -> InferRequest:
    """A request without outputs of its own."""
    return InferRequest(identity, {}, {}, {}, None, False)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_halves_are_asked_for_raw(datatype: str) -> None:
    """Before the model is run."""
    check_asked([AskedOutput("y", True)], {"y": datatype}, {"y": 2})
    with pytest.raises(BadInput, match=f"y: is {datatype}, which JSON has no numbers for: ask for it with binary_data"):
        check_asked([AskedOutput("y", False)], {"y": datatype}, {"y": 2})


def test_json_has_the_values_flat_beside_their_shape() -> None:
    """And the client's id, if it sent one."""
    body, length = write_answer(asking("7"), [AskedOutput("y", False)], {"y": ("FP32", SCORES)}, "m", "1.0")

    assert length is None
    assert json.loads(body) == {
        "model_name": "m",
        "model_version": "1.0",
        "id": "7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [0.25, 0.5, 1, 0]}],
    }
    assert b'"id"' not in write_answer(asking(), [AskedOutput("y", False)], {"y": ("FP32", SCORES)}, "m", None)[0]


def test_raw_tensors_stand_behind_the_json_in_their_order() -> None:
    """Beside one in JSON."""
    asked = [AskedOutput("b", True), AskedOutput("a", False), AskedOutput("c", True)]
    numbers, words = np.array([[1, 2, 3]], np.int8), as_objects([b"\xe9"])
    outputs = {"a": ("FP32", SCORES), "b": ("INT8", numbers), "c": ("BYTES", words)}

    body, length = write_answer(asking(), asked, outputs, "m", None)

    described = json.loads(body[:length])["outputs"]
    assert [(each["name"], each.get("parameters"), "data" in each) for each in described] == [
        ("b", {"binary_data_size": 3}, False),
        ("a", None, True),
        ("c", {"binary_data_size": 5}, False),
    ]
    assert body[length:] == b"\1\2\3" + b"\1\0\0\0\xe9"


def test_numbers_that_json_lacks_are_written_as_python_does() -> None:
    """NaN and the infinities, which clients of numpy read."""
    array = np.array([math.nan, math.inf], np.float32)

    body, _ = write_answer(asking(), [AskedOutput("y", False)], {"y": ("FP32", array)}, "m", None)

    assert b'"data":[NaN,Infinity]' in body


def test_content_types_are_answered_to_clients_that_speak_of_them() -> None:
    """MLServer's: of numbers `np` or what was asked for, of texts `str`; the whole is a frame if it came so."""
    words = as_objects([b"a", b"b"])
    outputs = {"y": ("FP32", SCORES), "w": ("BYTES", words)}
    both = [AskedOutput("y", True), AskedOutput("w", False)]

    def parameters(request: InferRequest, asked: list[AskedOutput]) -> tuple[Any, list[Any]]:
        body, length = write_answer(request, asked, outputs, "m", None)
        document = json.loads(body[:length])
        return document.get("parameters"), [each.get("parameters") for each in document["outputs"]]

    silent, frame, single = (replace(asking(), content_type=each) for each in ("", "pd", "np"))
    of_input = replace(asking(), content_types={"x": "np"})
    numbers = {"content_type": "np", "binary_data_size": 16}
    assert parameters(silent, both) == (None, [{"binary_data_size": 16}, None])
    assert parameters(frame, both) == ({"content_type": "pd"}, [numbers, {"content_type": "str"}])
    assert parameters(single, both[:1]) == ({"content_type": "np"}, [numbers])
    assert parameters(single, both)[0] is None
    assert parameters(of_input, both) == (None, [numbers, {"content_type": "str"}])
    named = [AskedOutput("y", False, content_type="pd")]
    assert parameters(replace(asking(), outputs=named), named) == (None, [{"content_type": "pd"}])


def test_nan_is_null_for_clients_of_mlservers_numbers() -> None:
    """As its codecs write it; the infinities stay."""
    array = np.array([math.nan, 1, math.inf], np.float32)
    request = replace(asking(), content_types={"x": "np"})

    body, _ = write_answer(request, [AskedOutput("y", False)], {"y": ("FP32", array)}, "m", None)

    assert b'"data":[null,1.0,Infinity]' in body


def test_a_classification_names_the_largest_scores_of_each_row() -> None:
    """`value:index`, no more than there are; equal ones in their order."""
    assert classify(SCORES, 5).tolist() == [[b"0.500000:1", b"0.250000:0"], [b"1.000000:0", b"0.000000:1"]]
    assert classify(np.array([[3, 3, 9]]), 2).tolist() == [[b"9.000000:2", b"3.000000:0"]]
    with pytest.raises(BadInput, match="y: is no tensor of scores"):
        check_asked([AskedOutput("y", False, 1)], {"y": "FP32"}, {"y": 3})

    body, _ = write_answer(asking(), [AskedOutput("y", False, 1)], {"y": ("FP32", SCORES)}, "m", None)

    assert json.loads(body)["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [2, 1], "data": ["0.500000:1", "1.000000:0"]}
    ]


@pytest.mark.parametrize("value", [0.0, 1.5, -2.0, 1.00390625, 1.01171875, 3.4e38, math.inf, -math.inf, 1e-40])
def test_bfloat16_is_rounded_to_the_nearest_even_number(value: float) -> None:
    """As torch rounds it."""
    torch = pytest.importorskip("torch")
    array: Array = np.array([value], np.float32)

    raw = bytes(to_raw("BF16", array))

    assert raw == torch.from_numpy(array).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_bfloat16_keeps_what_is_no_number() -> None:
    """Rounding would make an infinity of it, or another number."""
    raw = bytes(to_raw("BF16", np.array([math.nan], np.float32)))

    assert np.isnan(from_raw("BF16", memoryview(raw), (1,))).all()


def test_an_array_that_is_not_in_one_piece_is_written_row_by_row() -> None:
    """A view across its axes, and one of nothing."""
    turned = np.arange(6, dtype=np.int16).reshape(2, 3).T

    assert bytes(to_raw("INT16", turned)) == np.ascontiguousarray(turned).tobytes()
    assert bytes(to_raw("FP32", np.empty((0, 3), np.float32))) == b""
