"""Inputs drawn from a declaration, to warm up and check a model with that names no samples of its own. Pure.

Only tensors are drawn. What makes sense as text or as JSON is not declared.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marserve.option_values import Sample

# Two that differ, so that swapped answers are seen; small enough to keep.
COUNT = 2
MOST_NUMBERS = 1 << 18
MOST_DIMENSIONS = 64  # numpy's
# What stands for a size that varies.
SIZE = 4
_FLOATS = (0.0, 0.5, -0.5, 0.25, 1.0, -0.25, 0.75)


def draw_samples(document: Mapping[str, Any] | None) -> tuple[Sample, ...]:
    """Requests that fit the declaration: one item each, as JSON. Empty for what is no declaration of small tensors."""
    try:
        inputs = [] if document is None or document.get("kind") != "tensors" else list(document["inputs"])
        shapes = [
            [size if isinstance(size, int) else SIZE for size in each["shape"] if size != "batch"] for each in inputs
        ]
        if not inputs or not all(map(_can_be_drawn, shapes)) or sum(map(math.prod, shapes)) > MOST_NUMBERS:
            return ()
        return tuple(
            Sample(
                "application/json",
                body=json.dumps(
                    {
                        each["name"]: _nested(shape, _numbers(str(each["dtype"]), number))
                        for each, shape in zip(inputs, shapes, strict=True)
                    }
                ).encode(),
            )
            for number in range(COUNT)
        )
    except (KeyError, TypeError, IndexError):  # the worker will say what is wrong with it
        return ()


def _can_be_drawn(shape: Sequence[int]) -> bool:
    """Whether the shape has numbers at all: of one with a size of 0, the other sizes may be of any length."""
    return len(shape) <= MOST_DIMENSIONS and all(size > 0 for size in shape)


def _numbers(dtype: str, start: int) -> Iterator[Any]:
    """Numbers of a dtype without end, other ones for each `start`. Whole ones are 0 and 1, as all vocabularies have."""
    if dtype == "bool":
        return itertools.cycle((start == 0, start == 1))
    if "int" in dtype:
        return itertools.cycle((start, 1 - start))
    return itertools.islice(itertools.cycle(_FLOATS), start, None)


def _nested(shape: Sequence[int], numbers: Iterator[Any]) -> Any:
    if not shape:
        return next(numbers)
    return [_nested(shape[1:], numbers) for _ in range(shape[0])]
