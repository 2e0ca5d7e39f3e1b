"""Tests for what the Open Inference Protocol says of a server and its models."""

from __future__ import annotations

from typing import Any

import pytest
from PIL.Image import Image

from marserve.api.open_inference.documents import (
    config_document,
    index_document,
    metadata_document,
    server_document,
    statistics_document,
)
from marserve.api.open_inference.mark import MARK
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve_handlers.declared.declaration import DTYPES, Declaration, Tensor
from marserve_handlers.declared.items import input_type, output_type
from marserve_handlers.declared.open_inference import datatypes, marking

DECLARATION = Declaration(
    {"pixels": Tensor("float32", ["batch", 1, "side", 28]), "n": Tensor("int64", ["batch"], optional=True)},
    {"scores": Tensor("bfloat16", ["batch", 10])},
).document()


def described(**more: Any) -> dict[str, Any]:
    """What describe says of a version, as far as a configuration has it."""
    return {
        "modelName": "m",
        "modelVersion": "1.0",
        "deviceType": "cpu",
        "batchSize": 8,
        "maxBatchDelay": 50,
        "minWorkers": 2,
        **more,
    }


def test_server_and_worker_use_one_mark_and_one_table_of_types() -> None:
    """Two rooms that may not import each other say the same."""
    assert MARK == marking.MARK
    tensors = {f"x{number}": Tensor(dtype, ["batch"]) for number, dtype in enumerate(DTYPES)}
    inputs = metadata_document("m", [], Declaration(tensors, tensors).document())["inputs"]
    assert [each["datatype"] for each in inputs] == [datatypes.datatype_of(dtype) for dtype in DTYPES]


def test_a_model_without_tensors_has_none() -> None:
    """One that declares nothing, one that declares an item of JSON, and one that streams its answers."""
    item = Declaration(input=input_type("m", dict, "data")[0], output=output_type("m", bytes))
    stream = Declaration(input=input_type("m", str, "data")[0], output=output_type("m", str, is_stream=True))

    for declaration in (None, item.document(), stream.document()):
        document = metadata_document("m", ["1.0"], declaration)
        assert (document["inputs"], document["outputs"]) == ([], [])


@pytest.mark.parametrize(
    ("came", "gives", "content_types"),
    [
        (str, str, ("str", "str")),
        (bytes, dict, ("base64", "json")),
        (Image, Any, ("base64", None)),
        (str, Image, ("str", "base64")),
    ],
)
def test_texts_bytes_and_pictures_are_elements_of_one_tensor(came: Any, gives: Any, content_types: Any) -> None:
    """With MLServer's words for them, where the protocol's message has a place for parameters."""
    declaration = Declaration(input=input_type("m", came, "data")[0], output=output_type("m", gives))
    document = declaration.document()

    told = metadata_document("m", [], document)
    bare = metadata_document("m", [], document, has_parameters=False)
    config = config_document(described(), document)

    tensors = [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in ("input", "output")]
    assert declaration.takes_elements
    assert [*bare["inputs"], *bare["outputs"]] == tensors
    for tensor, bare_one, content_type in zip((*told["inputs"], *told["outputs"]), tensors, content_types, strict=True):
        assert tensor == ({**bare_one, "parameters": {"content_type": content_type}} if content_type else bare_one)
    assert config["input"] == [{"name": "input", "data_type": "TYPE_STRING", "dims": [1]}]
    assert config["output"] == [{"name": "output", "data_type": "TYPE_STRING", "dims": [1]}]


def test_metadata_has_the_declared_tensors_with_their_batch_axis() -> None:
    """Sizes that vary are -1."""
    document = metadata_document("m", ["1.0", "2.0"], DECLARATION)

    assert document == {
        "name": "m",
        "versions": ["1.0", "2.0"],
        "platform": "marserve_python",
        "inputs": [
            {"name": "pixels", "datatype": "FP32", "shape": [-1, 1, -1, 28]},
            {"name": "n", "datatype": "INT64", "shape": [-1]},
        ],
        "outputs": [{"name": "scores", "datatype": "BF16", "shape": [-1, 10]}],
    }


def test_a_configuration_has_tritons_words() -> None:
    """Without the batch axis, which `max_batch_size` stands for."""
    document = config_document(described(), DECLARATION)

    assert document["max_batch_size"] == 8
    assert document["input"] == [
        {"name": "pixels", "data_type": "TYPE_FP32", "dims": [1, -1, 28]},
        {"name": "n", "data_type": "TYPE_INT64", "dims": [], "optional": True},
    ]
    assert document["output"] == [{"name": "scores", "data_type": "TYPE_BF16", "dims": [10]}]
    assert document["instance_group"] == [{"name": "m", "kind": "KIND_CPU", "count": 2, "gpus": []}]
    assert document["dynamic_batching"] == {"max_queue_delay_microseconds": 50000}
    on_gpu = config_document(described(deviceType="gpu", deviceIds=[1]), None)["instance_group"][0]
    assert (on_gpu["kind"], on_gpu["gpus"]) == ("KIND_GPU", [1])


def test_a_model_without_a_batch_axis_has_its_whole_shapes_and_no_largest_batch() -> None:
    """As Triton has it."""
    tensors = {"x": Tensor("float32", ["batch", 3, "n"])}
    declaration = Declaration(tensors, tensors, has_batch_axis=False).document()

    config = config_document(described(), declaration)

    assert metadata_document("m", [], declaration)["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [3, -1]}]
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (0, [3, -1])


def test_the_index_has_every_version_or_those_that_answer() -> None:
    """With the state of the others."""
    versions = [("m", "1.0", True, "ready"), ("m", "2.0", False, "loading")]

    assert index_document(versions, only_ready=False) == [
        {"name": "m", "version": "1.0", "state": "READY", "reason": ""},
        {"name": "m", "version": "2.0", "state": "UNAVAILABLE", "reason": "loading"},
    ]
    assert [each["version"] for each in index_document(versions, only_ready=True)] == ["1.0"]


def test_statistics_are_the_versions_counts() -> None:
    """In nanoseconds; failures are counted apart, of the handler's choosing or not; not what was never accepted."""
    metrics = VersionMetrics("m", "1.0")
    metrics.answers[200] += 3
    metrics.answers[400] += 1
    metrics.errors["bad_input"] += 2
    metrics.errors["handler"] += 1
    metrics.refused["queue_full"] += 5
    metrics.batch_sizes.observe(4)
    for _ in range(7):
        metrics.total_seconds.observe(0.5)
    metrics.queue_seconds.observe(0.25, times=4)
    metrics.handler_seconds.observe(0.125, times=4)
    metrics.stages.observe("decode", 0.001, 4)
    metrics.stages.observe("encode", 0.002, 4)
    metrics.runs_by_size.update({4: (1, 0.125), 1: (2, 0.25)})

    document = statistics_document(metrics)

    stats = document["inference_stats"]
    assert (document["inference_count"], document["execution_count"]) == (3, 1)
    assert stats["success"] == {"count": 3, "ns": 1_500_000_000}
    assert stats["fail"] == {"count": 4, "ns": 2_000_000_000}
    assert stats["queue"] == {"count": 4, "ns": 1_000_000_000}
    assert stats["compute_infer"] == {"count": 4, "ns": 500_000_000}
    assert (stats["compute_input"], stats["compute_output"]) == (
        {"count": 4, "ns": 4_000_000},
        {"count": 4, "ns": 8_000_000},
    )
    nothing = {"count": 2, "ns": 0}
    assert document["batch_stats"][0] == {
        "batch_size": 1,
        "compute_input": nothing,
        "compute_infer": {"count": 2, "ns": 250_000_000},
        "compute_output": nothing,
    }
    assert [each["batch_size"] for each in document["batch_stats"]] == [1, 4]
    assert statistics_document(VersionMetrics("m", "2.0"))["inference_stats"]["success"] == {"count": 0, "ns": 0}


def test_a_request_whose_client_went_away_has_failed() -> None:
    """As in Triton; it has no time, as nothing ended it."""
    metrics = VersionMetrics("m", "1.0", cancelled=2)
    metrics.answers[200] = metrics.errors["handler"] = 1
    metrics.total_seconds.observe_all([0.5, 0.5])

    stats = statistics_document(metrics)["inference_stats"]

    assert (stats["success"]["count"], stats["fail"]) == (1, {"count": 3, "ns": 500_000_000})


def test_the_server_names_itself_and_what_it_answers_beyond_the_protocol() -> None:
    """By the words that clients look for."""
    document = server_document()

    assert document["name"] == "marserve"
    assert "binary_tensor_data" in document["extensions"]
