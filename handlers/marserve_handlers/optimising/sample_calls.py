"""A few calls of a model with what it gave, in one file: what a load of a build is checked against."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marserve_handlers.optimising.call_arrays import Call, as_numpy, leaves_of
from marserve_handlers.optimising.capture import run_model
from marserve_handlers.optimising.material import shape_of_value, value_of_shape
from marserve_handlers.support.comparing.held_models import is_session

MOST_SAMPLES = 64
MOST_BYTES = 16 << 20
_SHAPES = "shapes"

Outputs = dict[str, np.ndarray[Any, Any]]


def write_samples(path: Path, model: Any, calls: Sequence[Call]) -> int:
    """Write as many of these calls as fit, with what `model` gives; how many. Raises TypeError for odd arguments."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    shapes: list[Any] = []
    size = 0
    for at, call in enumerate(calls[:MOST_SAMPLES]):
        given = {f"{at}/in/{name}": as_numpy(leaf) for name, leaf in call.leaves.items()}
        given |= {f"{at}/out/{name}": as_numpy(leaf) for name, leaf in leaves_of(run_model(model, call)).items()}
        size += sum(array.nbytes for array in given.values())
        if size > MOST_BYTES and at:
            break
        whole = {**{str(place): each for place, each in enumerate(call.args)}, **call.kwargs}
        shapes.append({"args": len(call.args), "whole": shape_of_value(whole)})
        arrays |= given
    arrays[_SHAPES] = np.frombuffer(json.dumps(shapes).encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # its keywords are names of arrays
    return len(shapes)


def read_samples(path: Path, model: Any) -> Iterator[tuple[Call, Outputs]]:
    """The calls for `model`, with what is recorded. Raises OSError, ValueError, KeyError for a file that is none."""
    with np.load(path, allow_pickle=False) as arrays:
        names = list(arrays)
        for at, shape in enumerate(json.loads(bytes(arrays[_SHAPES]))):
            leaves = {
                name.removeprefix(f"{at}/in/"): _for(model, arrays[name])
                for name in names
                if name.startswith(f"{at}/in/")
            }
            whole = value_of_shape(shape["whole"], leaves)
            args = tuple(whole[str(place)] for place in range(shape["args"]))
            kwargs = {name: value for name, value in whole.items() if not (name.isdigit() and int(name) < len(args))}
            outputs = {name.removeprefix(f"{at}/out/"): arrays[name] for name in names if name.startswith(f"{at}/out/")}
            yield Call(args, kwargs), outputs


def _for(model: Any, array: np.ndarray[Any, Any]) -> Any:
    if is_session(model):
        return array
    import torch  # here: a session's process need not have it

    return torch.from_numpy(array)
