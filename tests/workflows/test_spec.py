"""Specs of workflows: values, their reach, and what is wrong with a spec."""

from __future__ import annotations

import json

import pytest

from marserve.errors import BadDag, BadWorkflow
from marserve.workflows.spec import OPTION_KEYS, TOP_KEYS, Node, NodeOptions, parse_spec
from support.inventory import inventory
from support.workflow_archives import THREE_NODES


def test_models_and_functions_are_told_apart_by_the_section_models() -> None:
    """What is declared there is a model; the rest of the graph are functions."""
    spec = parse_spec(THREE_NODES.encode())

    assert [(node.name, node.url) for node in spec.nodes.values()] == [
        ("prepare", None),
        ("middle", "middle.mar"),
        ("finish", None),
    ]
    assert str(spec.dag) == "{prepare=[middle], middle=[finish]}"
    assert spec.warnings == ()


def test_a_spec_without_models_is_all_functions() -> None:
    """TorchServe fails with it; nothing is missing."""
    spec = parse_spec(b"dag:\n  first: [second]\n  second: []\n")

    assert [(node.name, node.is_function) for node in spec.nodes.values()] == [("first", True), ("second", True)]
    assert spec.warnings == ()


def test_values_are_in_seconds_and_a_model_may_have_its_own() -> None:
    """Milliseconds end at the edge."""
    spec = parse_spec(
        b"""
models:
  min-workers: 2
  max-workers: 4
  batch-size: 3
  max-batch-delay: 250
  retry-attempts: 5
  timeout-ms: 1500
  a: {url: a.mar}
  b: {url: b.mar, max-workers: 2, batch-size: 8, timeout-ms: 20}
dag: {a: [b]}
"""
    )

    assert spec.nodes["a"].options == NodeOptions(2, 4, 3, 0.25, 5, 1.5)
    assert spec.nodes["b"].options == NodeOptions(2, 2, 8, 0.25, 5, 0.02)
    assert spec.defaults == NodeOptions(2, 4, 3, 0.25, 5, 1.5)


def test_values_for_all_count_for_models_written_after_them() -> None:
    """As TorchServe reads the section: from top to bottom (contract 4.2)."""
    spec = parse_spec(b"models:\n  a: {url: a.mar}\n  batch-size: 7\n  b: {url: b.mar}\ndag: {a: [b]}\n")

    assert (spec.nodes["a"].options.batch_size, spec.nodes["b"].options.batch_size) == (1, 7)


def test_a_function_has_one_worker_no_batches_and_the_common_time_out() -> None:
    """Whatever the values for models say of workers and batches (contract 4.2)."""
    spec = parse_spec(
        b"models: {min-workers: 3, max-workers: 3, batch-size: 9, retry-attempts: 2, timeout-ms: 70, m: {url: m}}\n"
        b"dag: {f: [m]}\n"
    )

    assert spec.nodes["f"] == Node("f", None, NodeOptions(1, 1, 1, 0.0, 2, 0.07))


def test_defaults_are_torchserves() -> None:
    """One worker, single requests, 50 ms, one more attempt, ten seconds."""
    assert parse_spec(b"dag: {f: [g]}").defaults == NodeOptions(1, 1, 1, 0.05, 1, 10.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"models: [\n", "Failed to parse yaml."),
        (b"\xff\xfe\x00", "Failed to parse yaml."),
        (b"dag: !!python/object/apply:os.system ['true']", "Failed to parse yaml."),
        (b"", "must hold the keys models and dag"),
        (b"[1]", "must hold the keys models and dag"),
        (b"models: {}", "has no graph: dag must hold nodes"),
        (b"dag: [a, b]", "has no graph"),
        (b"dag: {a: b}", "Node a in dag of workflow.yaml is 'b'; it must be a list of nodes"),
        (b"dag: {1: [a]}", "1 in dag of workflow.yaml is no name"),
        (b"models: 3\ndag: {a: []}", "models of workflow.yaml must hold models by their names, not 3"),
        (b"models: {a: m.mar}\ndag: {a: []}", "model a of workflow.yaml is 'm.mar'; it must hold the key url"),
        (b"models: {a: {batch-size: 2}}\ndag: {a: []}", "model a of workflow.yaml needs the key url"),
        (b"models: {timeout-ms: 0}\ndag: {a: []}", "timeout-ms in models of workflow.yaml is 0; it must be a whole"),
        (
            b"models: {batch-size: '4'}\ndag: {a: []}",
            "batch-size in models of workflow.yaml is '4'; it must be a whole",
        ),
        (b"models: {timeout-ms: true}\ndag: {a: []}", "timeout-ms in models of workflow.yaml is True"),
        (b"models: {retry-attempts: 101}\ndag: {a: []}", "retry-attempts in models of workflow.yaml is 101"),
        (
            b"dag: {pre-process: []}",
            "Node 'pre-process' of workflow.yaml is neither a model nor the name of a function",
        ),
        (b"#" * (1 << 18) + b"#", "has more than 262144 bytes"),
        (json.dumps({"dag": {"a": [f"n{n}" for n in range(200)]}}).encode(), "has 201 nodes; at most 128 are allowed"),
    ],
)
def test_what_cannot_be_used_is_named(text: bytes, message: str) -> None:
    """Each value that is wrong, where it stands, and what it must be."""
    with pytest.raises(BadWorkflow) as caught:
        parse_spec(text)

    assert message in caught.value.message


def test_the_line_of_a_mistake_in_yaml_is_told_beside_torchserves_words() -> None:
    """The words are what its clients know; the reason is for who mends the spec."""
    with pytest.raises(BadWorkflow) as caught:
        parse_spec(b"models:\n  a: [\ndag: {a: []}\n", "spec.yaml")

    assert caught.value.reason == "spec.yaml is no YAML (line 4)"


def test_a_graph_that_cannot_be_run_is_an_error_of_its_own() -> None:
    """Its type is what TorchServe's clients look at."""
    with pytest.raises(BadDag, match="Self loop exception"):
        parse_spec(b"dag: {a: [a]}")


def test_what_is_not_used_is_a_warning() -> None:
    """As TorchServe, which takes all this: unknown keys, a model outside of the graph, a key that stands twice."""
    spec = parse_spec(b"note: 1\nmodels: {a: {url: a}, a: {url: b, foo: 3}, z: {url: z}}\ndag: {a: []}\n")

    assert spec.warnings == (
        "a stands in workflow.yaml more than once; the last one counts",
        "note is no key of a workflow's spec",
        "model a of workflow.yaml has the key 'foo', which is not used; it may hold url, min-workers, max-workers, "
        "batch-size, max-batch-delay, retry-attempts, timeout-ms",
        "model z is in no edge of the graph, and is not registered",
    )


def test_numbers_that_are_too_small_count_as_the_least_with_a_warning() -> None:
    """TorchServe takes them; only a time-out of nothing could never be kept."""
    spec = parse_spec(
        b"models: {retry-attempts: -1, a: {url: a, batch-size: 0, max-batch-delay: -5, min-workers: 3}}\ndag: {a: []}"
    )

    assert spec.nodes["a"].options == NodeOptions(3, 1, 1, 0.0, 0, 10.0)
    assert spec.warnings == (
        "retry-attempts in models of workflow.yaml is -1, which counts as 0",
        "batch-size in model a of workflow.yaml is 0, which counts as 1",
        "max-batch-delay in model a of workflow.yaml is -5, which counts as 0",
        "min-workers of model a of workflow.yaml is 3 and max-workers 1, which is how many there are",
    )


def test_every_key_of_torchserves_spec_is_known() -> None:
    """The walk of the inventory's list."""
    keys = inventory("workflow_spec_keys")

    assert set(keys["top"]) == set(TOP_KEYS)
    assert set(keys["models"]) == set(OPTION_KEYS)
    assert set(keys["model"]) == {"url", *OPTION_KEYS}
