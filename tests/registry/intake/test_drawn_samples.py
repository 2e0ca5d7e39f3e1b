"""Tests for the inputs that are drawn from a declaration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from marserve.registry.intake.drawn_samples import draw_samples
from marserve_handlers import Tensor
from marserve_handlers.declared.stacking import Inputs


def declaration(**tensors: Tensor) -> dict[str, Any]:
    """The document of a model with these inputs."""
    inputs = [{"name": name, **tensor.describe()} for name, tensor in tensors.items()]
    return {"version": 1, "kind": "tensors", "inputs": inputs, "outputs": []}


@pytest.mark.parametrize(
    "document",
    [
        None,
        {"kind": "item", "input": {"type": "text"}},
        {"kind": "tensors"},
        {"kind": "tensors", "inputs": [{"name": "x"}]},
        {"kind": "tensors", "inputs": 3},
        declaration(x=Tensor("float32", ["batch", 1024, 1024])),
        declaration(x=Tensor("float32", ["batch", 1 << 40, 0])),
        declaration(x=Tensor("float32", ["batch", 1 << 40, -1])),
        declaration(x=Tensor("float32", ["batch", *[1] * 20_000])),
    ],
)
def test_what_cannot_be_drawn_gives_no_samples(document: Any) -> None:
    """Items, what is no declaration, and tensors that are too large to keep, or have no numbers but long lists."""
    assert draw_samples(document) == ()


def test_what_has_no_batch_axis_is_drawn_as_it_is() -> None:
    """Its first size is one of the item."""
    document = {"kind": "tensors", "batch": False, "inputs": [{"name": "x", "dtype": "int64", "shape": [2, "n"]}]}

    samples = [json.loads(sample.body or b"") for sample in draw_samples(document)]

    assert samples == [{"x": [[0, 1, 0, 1], [0, 1, 0, 1]]}, {"x": [[1, 0, 1, 0], [1, 0, 1, 0]]}]


def test_two_samples_that_fit_and_differ_are_drawn() -> None:
    """Each is one item, in every tensor another one; the model reads it."""
    tensors = {
        "ids": Tensor("int64", ["batch", "tokens"]),
        "mask": Tensor("bool", ["batch", "tokens"]),
        "picture": Tensor("float32", ["batch", 1, 2, 2]),
        "scale": Tensor("float16", ["batch"]),
    }

    one, other = (json.loads(sample.body) for sample in draw_samples(declaration(**tensors)))

    assert all(one[name] != other[name] for name in tensors)
    rows = Inputs(tensors, 8).read_value(one)
    assert (rows.count, rows.is_batch, rows.arrays["picture"].shape) == (1, False, (1, 1, 2, 2))
