"""What a model is called with and gives: nested values with tensors or arrays in them, as named leaves.

A leaf is a tensor of torch or an array of numpy; lists, tuples, maps and dataclasses are looked into. Its name is the
path to it: `input_ids`, `hidden.0`, or `output` for a value that is a leaf itself. Torch is not imported: who passes a
tensor has it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

ITSELF = "output"
_MOST_DEPTH = 20


def is_leaf(value: Any) -> bool:
    """Whether a value is a tensor or an array."""
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def leaves_of(value: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """The leaves of a value by their names, in order. What is no leaf, text or numbers say, is left out."""
    if is_leaf(value):
        return {path or ITSELF: value}
    found: dict[str, Any] = {}
    if depth > _MOST_DEPTH:
        return found
    if isinstance(value, Mapping):
        items = [(str(key), below) for key, below in value.items()]
    elif isinstance(value, (list, tuple)):
        items = list(zip(getattr(value, "_fields", map(str, range(len(value)))), value, strict=True))
    else:
        items = list(_members(value).items())
    for name, below in items:
        found.update(leaves_of(below, f"{path}.{name}" if path else name, depth + 1))
    return found


def with_leaves(value: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """The value with these leaves in the places of its own; everything else stays."""
    if is_leaf(value):
        return leaves[path or ITSELF]
    if isinstance(value, Mapping):
        below = {key: with_leaves(each, leaves, f"{path}.{key}" if path else str(key)) for key, each in value.items()}
        kind: Any = type(value)
        return kind(below)
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", map(str, range(len(value))))
        each_below = [
            with_leaves(each, leaves, f"{path}.{name}" if path else name)
            for name, each in zip(names, value, strict=True)
        ]
        return type(value)(*each_below) if hasattr(value, "_fields") else type(value)(each_below)
    members = _members(value)
    if members:
        value = copy.copy(value)
        for name, each in members.items():
            # Past its __init__, which may compute what it is not given, and past a frozen one's refusal.
            object.__setattr__(value, name, with_leaves(each, leaves, f"{path}.{name}" if path else name))
    return value


def _members(value: Any) -> dict[str, Any]:
    """What the fields of a dataclass hold, by name; nothing for any other value."""
    if not is_dataclass(value) or isinstance(value, type):
        return {}
    return {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}


def as_numpy(leaf: Any) -> np.ndarray[Any, Any]:
    """A leaf as an array of its own memory. bfloat16, which numpy does not know, becomes float32; texts in objects, as
    ONNX Runtime gives them, become numpy's own. Raises TypeError for other objects."""
    if not isinstance(leaf, np.ndarray):
        tensor = leaf.detach().cpu().resolve_conj().resolve_neg()
        leaf = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    if leaf.dtype.hasobject:
        return _as_texts(leaf)
    array: np.ndarray[Any, Any] = leaf.copy()
    return array


def _as_texts(objects: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    kinds = sorted({type(each).__name__ for each in objects.flat} - {"str"})
    if kinds:
        raise TypeError(f"an array holds values of the types {', '.join(kinds)}, which cannot be compared")
    return objects.astype(np.str_)


def own_copy(leaf: Any) -> Any:
    """A copy of a leaf, of its own kind and on its own device."""
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf.detach().clone()


@dataclass(frozen=True, slots=True)
class Call:
    """What a model was called with. `rows` is the length of the batch axis, 0 where its inputs share none."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def leaves(self) -> dict[str, Any]:
        """All leaves of its arguments by name; those given by position have their place as name."""
        return leaves_of({**{str(at): each for at, each in enumerate(self.args)}, **self.kwargs})

    @property
    def rows(self) -> int:
        """The length of the batch axis; 0 where its inputs share none."""
        lengths = {leaf.shape[0] if len(leaf.shape) else 0 for leaf in self.leaves.values()}
        return int(lengths.pop()) if len(lengths) == 1 else 0

    @property
    def shapes(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """Name, dtype and shape without the batch axis of each leaf: calls that share them make one batch."""
        return tuple((name, str(leaf.dtype), tuple(leaf.shape[1:])) for name, leaf in self.leaves.items())

    def replaced(self, leaves: Mapping[str, Any]) -> Call:
        """The call with other leaves of these names."""
        whole = with_leaves({**{str(at): each for at, each in enumerate(self.args)}, **self.kwargs}, leaves)
        return Call(tuple(whole[str(at)] for at in range(len(self.args))), {name: whole[name] for name in self.kwargs})


def join(calls: Sequence[Call]) -> Call:
    """One call with the rows of all, in order. All must have rows and the same `shapes`."""
    each_leaves = [call.leaves for call in calls]
    return calls[0].replaced({name: _joined([leaves[name] for leaves in each_leaves]) for name in each_leaves[0]})


def louder(call: Call, factor: float) -> Call | None:
    """The call with its floating numbers so many times as large; None where it has no such leaf."""
    leaves = call.leaves
    loud = {name: leaf * factor if is_floating(leaf) else leaf for name, leaf in leaves.items()}
    return call.replaced(loud) if any(map(is_floating, leaves.values())) else None


def is_floating(leaf: Any) -> bool:
    """Whether a leaf holds floating numbers."""
    return "float" in str(leaf.dtype)


def _joined(leaves: Sequence[Any]) -> Any:
    if isinstance(leaves[0], np.ndarray):
        return np.concatenate(leaves)
    return sys.modules["torch"].cat(list(leaves))
