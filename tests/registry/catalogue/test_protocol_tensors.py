"""Tests for which tensors a call of the Open Inference Protocol may have."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.api.open_inference.documents import config_document, metadata_document
from marserve.registry.catalogue.protocol_tensors import protocol_tensors, reads_tensors

DECLARED = {"kind": "tensors", "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 2]}], "outputs": []}
ROW = {"name": "input-0", "datatype": "BYTES", "shape": [1]}


@pytest.mark.parametrize("handler", ["handler.py", "h:entry", "image_classifier", "text_classifier"])
def test_under_the_protocols_envelope_a_row_is_one_element_of_bytes(handler: str) -> None:
    """By the name that the envelope gives an input; what the handler answers is not known."""
    tensors = protocol_tensors(handler, "kservev2", None)
    metadata = metadata_document("m", ["1.0"], tensors)
    described = {"modelName": "m", "modelVersion": "1.0", "deviceType": "cpu", "batchSize": 8, "maxBatchDelay": 50}
    config = config_document({**described, "minWorkers": 1}, tensors)

    assert (metadata["inputs"], metadata["outputs"]) == ([ROW], [])
    assert config["input"] == [{"name": "input-0", "data_type": "TYPE_STRING", "dims": [1]}]
    assert (config["max_batch_size"], config["output"]) == (0, [])


@pytest.mark.parametrize("envelope", [None, "", "json", "kserve", "body", "mine"])
@pytest.mark.parametrize("handler", ["handler.py", "base_handler", "image_classifier"])
def test_what_reads_no_tensors_has_none(handler: str, envelope: str | None) -> None:
    """The handler gets the body, or its envelope reads another form."""
    assert protocol_tensors(handler, envelope, None) is None


@pytest.mark.parametrize("handler", ["base_handler", "vllm_handler", "trt_llm_handler"])
def test_a_program_that_declares_nothing_has_no_tensors_under_the_protocols_envelope(handler: str) -> None:
    """It takes numbers of a shape that nothing says, or a prompt in JSON."""
    assert protocol_tensors(handler, "kservev2", None) is None


@pytest.mark.parametrize(
    ("handler", "envelope", "has_them"),
    [
        ("base_handler", None, True),
        ("base_handler", "kservev2", True),
        ("base_handler", "kserve", False),
        ("base_handler.py", "json", False),
        ("ts/torch_handler/base_handler.py", "body", False),
        ("sums.py", "kserve", True),
        ("sums:Sums", "mine", True),
    ],
)
def test_declared_tensors_are_those_of_the_protocol_unless_an_envelope_reads_another_form(
    handler: str, envelope: str | None, has_them: bool
) -> None:
    """A handler of `@model` is in no envelope."""
    tensors: Any = protocol_tensors(handler, envelope, DECLARED)

    assert reads_tensors(handler, envelope) is has_them
    assert tensors == (DECLARED if has_them else None)
