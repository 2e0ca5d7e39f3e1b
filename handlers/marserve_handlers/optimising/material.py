"""What a build is made from: the parent's model, and calls of it that were captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from marserve_handlers.optimising.call_arrays import Call, as_numpy, is_leaf, leaves_of, with_leaves
from marserve_handlers.optimising.capture import run_model
from marserve_handlers.support.comparing.held_models import is_session


@dataclass(frozen=True, slots=True)
class Material:
    """`calls` are calls of `model` with one row each or a few; `most_rows` is the largest batch it will get.

    `notes` gets sentences about what a build bakes, see `traps`.
    """

    model: Any
    calls: Sequence[Call]
    most_rows: int
    notes: list[str] = field(default_factory=list)

    @property
    def is_session(self) -> bool:
        """Whether the parent is a session of ONNX Runtime."""
        return is_session(self.model)

    @property
    def is_script(self) -> bool:
        """Whether the parent is TorchScript, which torch's exporters and compiler refuse."""
        import torch  # here: a session's process need not have it

        return isinstance(self.model, torch.jit.ScriptModule)

    @property
    def output(self) -> Any:
        """What the model gives for the first call."""
        return run_model(self.model, self.calls[0])

    def outputs(self) -> list[list[np.ndarray[Any, Any]]]:
        """What the model gives for each call, as arrays in order."""
        return [[as_numpy(leaf) for leaf in leaves_of(run_model(self.model, call)).values()] for call in self.calls]

    def feeds(self) -> list[dict[str, np.ndarray[Any, Any]]]:
        """The leaves of each call as arrays by name."""
        return [{name: as_numpy(leaf) for name, leaf in call.leaves.items()} for call in self.calls]


def shape_of_value(value: Any) -> Any:
    """How a value is nested, as JSON: where its leaves are, by name. Raises TypeError for what JSON cannot say.

    `{"leaf": "logits"}`, `{"list": […]}`, `{"tuple": […]}`, `{"dict": {…}}`, `{"value": 3}` for what is no leaf.
    """
    names = iter(leaves_of(value))
    return _shape(value, names)


def value_of_shape(shape: Any, leaves: Mapping[str, Any]) -> Any:
    """The value of that nesting, with these leaves."""
    if "leaf" in shape:
        return leaves[shape["leaf"]]
    if "value" in shape:
        return shape["value"]
    if "dict" in shape:
        return {name: value_of_shape(below, leaves) for name, below in shape["dict"].items()}
    if "list" in shape:
        return [value_of_shape(below, leaves) for below in shape["list"]]
    return tuple(value_of_shape(below, leaves) for below in shape["tuple"])


def _shape(value: Any, names: Any) -> Any:
    if is_leaf(value):
        return {"leaf": next(names)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_shape(below, names) for below in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _shape(below, names) for key, below in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise TypeError(
        f"there is a {type(value).__name__} in what it takes or gives; tensors, lists, tuples and dicts can be kept"
    )


def dynamic_axes_of(calls: Sequence[Call]) -> dict[str, set[int]]:
    """The axes of each leaf that differ from call to call, beside the first, which is the batch."""
    first = {name: tuple(leaf.shape) for name, leaf in calls[0].leaves.items()}
    found: dict[str, set[int]] = {name: set() for name in first}
    for call in calls:
        for name, leaf in call.leaves.items():
            if len(leaf.shape) != len(first[name]):
                raise TypeError(f"{name} has {len(leaf.shape)} axes in one input and {len(first[name])} in another")
            found[name] |= {at for at in range(1, len(leaf.shape)) if leaf.shape[at] != first[name][at]}
    return found


def structure_with(call: Call, leaves: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other values in the places of its leaves, None in the places of the rest."""
    whole: dict[str, Any] = {**{str(at): each for at, each in enumerate(call.args)}, **call.kwargs}
    marked = {name: _only_leaves(each) for name, each in whole.items()}
    replaced = with_leaves(marked, leaves)
    return tuple(replaced[str(at)] for at in range(len(call.args))), {name: replaced[name] for name in call.kwargs}


def _only_leaves(value: Any) -> Any:
    if is_leaf(value):
        return value
    if isinstance(value, Mapping):
        return {key: _only_leaves(below) for key, below in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_only_leaves(below) for below in value)
    return None
