"""What the batches that were seen take, by a counter for their kind of model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from marserve_handlers.flops.cost import Cost, NotCounted, fit
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.support.comparing.held_models import is_session

BATCHES = 8
MOST_NAMED = 8


# A protocol: modules and graphs have no code in common.
class Counter(Protocol):
    """What counts one model."""

    dtype: str
    uncounted: set[str]

    def count(self, call: Call, rows: int) -> int:
        """FLOPs of a call with so many rows."""


class Counted(NamedTuple):
    """What the model takes, for weights of `dtype` and inputs like `inputs`, and the operators that were left out."""

    cost: Cost
    dtype: str
    inputs: str
    uncounted: Sequence[str] = ()


class Seen:
    """A batch of so many requests: what the model was called with."""

    def __init__(self, requests: int, calls: Sequence[Call] = (), items: Sequence[Any] | None = None) -> None:
        self.requests = max(1, requests)
        self.calls = list(calls)
        self.items = items


def count(counter: Counter, batches: Sequence[Seen]) -> Counted:
    """What batches took that were seen. Raises NotCounted."""
    cost = _cost_of(counter, batches)
    uncounted = sorted(counter.uncounted)[:MOST_NAMED]
    if not cost.of(1):
        raise NotCounted(f"none of its operators is known{': ' if uncounted else ''}{', '.join(uncounted)}")
    kinds = {call.shapes for batch in batches for call in batch.calls}
    said = _said(batches[0].calls[0])
    inputs = said if len(kinds) == 1 else f"{said} and others, the mean of them"
    return Counted(cost, counter.dtype, inputs, uncounted)


def path_of(handle: Any, model: Any) -> str:
    """The file of a handler's model, where that is known; else empty."""
    if is_session(model):
        return str(getattr(model, "_model_path", None) or "")
    return str(getattr(getattr(handle, "__self__", None), "model_pt_path", None) or "")


def make_counter(model: Any, path: str) -> Counter:
    """What counts a module, or a session. Raises NotCounted."""
    if is_session(model):
        from marserve_handlers.flops.graphs import CountedGraph  # here: a session's process need not have torch

        return CountedGraph(path)
    from marserve_handlers.flops.modules import CountedModule  # here: likewise

    return CountedModule(model, path)


def read_document(said: Mapping[str, Any]) -> Counted:
    """What an archive says, as `as_document` wrote it."""
    cost = Cost(float(said["perBatch"]), float(said["perRequest"]))
    if not (0 <= cost.per_batch < math.inf and 0 <= cost.per_row < math.inf and 0 < cost.of(1) < math.inf):
        raise ValueError(f"{cost} is no cost")
    return Counted(cost, str(said["dtype"]), str(said["inputs"]), [str(name) for name in said["uncounted"]])


def as_document(counted: Counted) -> dict[str, Any]:
    """What was counted, for an archive of a build of the model."""
    return {
        "perBatch": counted.cost.per_batch,
        "perRequest": counted.cost.per_row,
        "dtype": counted.dtype,
        "inputs": counted.inputs,
        "uncounted": list(counted.uncounted),
    }


def _cost_of(counter: Counter, batches: Sequence[Seen]) -> Cost:
    """A line where each batch was one call of as many rows as requests, all of one shape; else the mean a request."""
    calls = [call for batch in batches for call in batch.calls]
    is_plain = all(len(batch.calls) == 1 and batch.calls[0].rows == batch.requests for batch in batches)
    if is_plain and len({call.shapes for call in calls}) == 1:
        return fit(lambda rows: counter.count(calls[0], rows), calls[0].rows)
    known: dict[Any, int] = {}
    total = 0
    for call in calls:
        kind = call.shapes, call.rows, tuple(leaf.shape for leaf in call.leaves.values())
        if kind not in known:
            known[kind] = counter.count(call, call.rows)
        total += known[kind]
    return Cost(0.0, total / sum(batch.requests for batch in batches))


def _said(call: Call) -> str:
    """Its inputs in words: `x float32 [n, 3, 224, 224]`."""
    rows = call.rows
    words = []
    for name, leaf in list(call.leaves.items())[:4]:
        shape = ["n" if at == 0 and rows else str(length) for at, length in enumerate(leaf.shape)]
        name = f"argument {int(name) + 1}" if name.isdigit() else name
        words.append(f"{name} {str(leaf.dtype).removeprefix('torch.')} [{', '.join(shape)}]")
    return ", ".join(words)
