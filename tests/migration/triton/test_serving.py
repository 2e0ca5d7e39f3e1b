"""Tests for how Triton serves a model, as options of marserve."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.archive.contents.model_config import parse_model_config
from marserve.migration.findings import Finding
from marserve.migration.triton.config_text import read_config
from marserve.migration.triton.notes import Notes, Refused
from marserve.migration.triton.serving import batching, instances, onnx_session, served_versions, warm_up


def mapped(text: str, part: Any, *more: Any) -> tuple[Any, list[tuple[str, str]]]:
    """The options of one part, and the verdict and words of each finding."""
    findings: list[Finding] = []
    options = part(read_config(text.encode()), *more, Notes("c", findings))
    return options, [(each.verdict, each.what) for each in findings]


@pytest.mark.parametrize(
    ("text", "size", "options", "verdicts"),
    [
        ("", 0, {"batchSize": 1}, "works"),
        ("dynamic_batching { preferred_batch_size: 4 }", 0, {"batchSize": 1}, "works works"),
        ("", 1, {"batchSize": 1}, "works"),
        ("", 8, {"batchSize": 8}, "works differs"),
        ("dynamic_batching {}", 8, {"batchSize": 8}, "works works"),
        ("dynamic_batching { preferred_batch_size: 8 }", 8, {"batchSize": 8}, "works works works"),
        ("dynamic_batching { preferred_batch_size: [2, 4] }", 8, {"batchSize": 4}, "differs works works"),
        ("dynamic_batching { preferred_batch_size: 99 }", 8, {"batchSize": 8}, "differs works works"),
        (
            "dynamic_batching { max_queue_delay_microseconds: 3000 }",
            8,
            {"batchSize": 8, "maxBatchDelay": 3, "batchPolicy": "fixed"},
            "works works",
        ),
        (
            "dynamic_batching { max_queue_delay_microseconds: 100 preserve_ordering: true }",
            8,
            {"batchSize": 8, "maxBatchDelay": 1, "batchPolicy": "fixed"},
            "works differs differs",
        ),
        (
            "dynamic_batching { priority_levels: 3 default_priority_level: 2 priority_queue_policy { key: 1 } }",
            8,
            {"batchSize": 8, "defaultPriority": 1},
            "works works differs differs",
        ),
        (
            "dynamic_batching { default_queue_policy { max_queue_size: 7 default_timeout_microseconds: 1500 "
            "allow_timeout_override: true } }",
            8,
            {"batchSize": 8, "jobQueueSize": 7, "clientTimeoutInMills": 2},
            "works works works differs differs",
        ),
        (
            "dynamic_batching { default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1500 } }",
            8,
            {"batchSize": 8},
            "works works differs",
        ),
    ],
)
def test_batches_and_queues_are_those_that_come_nearest(
    text: str, size: int, options: dict[str, Any], verdicts: str
) -> None:
    """What is not the same is said."""
    found, said = mapped(text, batching, size)

    assert found == options
    assert [verdict for verdict, _ in said] == verdicts.split()


@pytest.mark.parametrize(
    ("text", "options", "verdicts"),
    [
        ("", (1, {}), "differs"),
        ("instance_group { count: 3 kind: KIND_CPU }", (3, {"deviceType": "cpu"}), "works"),
        ("instance_group { kind: KIND_GPU }", (1, {"deviceType": "gpu"}), "differs"),
        ("instance_group { count: 2 gpus: [1, 0] }", (4, {"deviceIds": [0, 1]}), "works"),
        (
            "instance_group [ { count: 2 gpus: 0 kind: KIND_GPU }, { gpus: 1 kind: 1 } ]",
            (3, {"deviceType": "gpu", "deviceIds": [0, 1]}),
            "differs",
        ),
        ("instance_group [ { kind: KIND_CPU }, { count: 2 gpus: 0 } ]", (2, {"deviceIds": [0]}), "differs works"),
        ("instance_group { kind: KIND_MODEL }", (1, {}), "differs"),
        ("instance_group { passive: true }", (1, {}), "differs differs"),
    ],
)
def test_instances_are_workers_on_the_same_devices(
    text: str, options: tuple[int, dict[str, Any]], verdicts: str
) -> None:
    """A count is for each GPU of a group."""
    found, said = mapped(text, instances)

    count, more = options
    assert found == {"minWorkers": count, "maxWorkers": count, **more}
    assert [verdict for verdict, _ in said] == verdicts.split()


@pytest.mark.parametrize("text", ["instance_group { gpus: -1 }", "instance_group { count: 1000000 }"])
def test_devices_and_counts_that_cannot_be_are_refused(text: str) -> None:
    """Before a server would pass over them."""
    with pytest.raises(Refused):
        mapped(text, instances)


def test_parameters_of_the_session_are_kept_and_others_said() -> None:
    """As are levels of optimization; a value that cannot be used is left out."""
    entry = 'parameters { key: "%s" value: { string_value: "%s" } }'
    given = {
        "intra_op_thread_count": "2",
        "execution_mode": "1",
        "enable_mem_arena": "0",
        "inter_op_thread_count": "-1",
    }
    text = " ".join(entry % each for each in {**given, "gpu_mem_limit": "1"}.items())

    found, said = mapped(f"{text} optimization {{ graph {{ level: -1 }} }}", onnx_session)

    session = {"graph_optimization_level": "basic", "intra_op_num_threads": 2, "execution_mode": "parallel"}
    assert found == {"onnx": {**session, "enable_cpu_mem_arena": False}}
    assert [what for verdict, what in said if verdict == "differs"] == [
        "the parameter inter_op_thread_count is left out",
        "the parameter gpu_mem_limit is left out",
    ]


@pytest.mark.parametrize(("data", "verdict"), [("zero_data: true", "works"), ('input_data_file: "x"', "differs")])
def test_a_warm_up_is_one_of_drawn_inputs(data: str, verdict: str) -> None:
    """Files are not taken."""
    value = f"value: {{ data_type: TYPE_FP32 dims: 2 {data} }}"

    found, said = mapped(f'model_warmup [ {{ name: "w" inputs {{ key: "x" {value} }} }} ]', warm_up)

    assert found == {"warmUp": True}
    assert [each for each, _ in said] == [verdict]


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("", [3]),
        ("version_policy { latest {} }", [3]),
        ("version_policy { latest { num_versions: 2 } }", [2, 3]),
        ("version_policy { latest { num_versions: 9 } }", [1, 2, 3]),
        ("version_policy { all {} }", [1, 2, 3]),
        ("version_policy: { specific: { versions: [3, 1, 7] } }", [1, 3]),
    ],
)
def test_the_versions_are_those_of_the_policy(text: str, versions: list[int]) -> None:
    """The highest is the last."""
    assert mapped(text, served_versions, (1, 2, 3))[0] == versions


def test_the_server_uses_every_option_that_is_written() -> None:
    """No key is misspelt, and no value out of its bounds."""
    text = """dynamic_batching { max_queue_delay_microseconds: 99999999999999
      priority_levels: 99 default_priority_level: 88
      default_queue_policy { max_queue_size: 4294967295 default_timeout_microseconds: 99999999999999 } }
      instance_group { kind: KIND_GPU gpus: [0, 1] }"""
    options = {**mapped(text, batching, 8)[0], **mapped(text, instances)[0], "warmUp": True}

    read = parse_model_config("".join(f"{key}: {value}\n" for key, value in options.items()).encode())

    assert read.warnings == []
    assert len(read.said) == len(options)
