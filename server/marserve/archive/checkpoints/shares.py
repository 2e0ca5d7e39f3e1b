"""How much of a model each rank of a worker holds, by a plan of `parallel`: from names and shapes alone. Pure.

As `marserve_handlers.sharding.plan` divides, which knows the modules' classes: of a Linear and of an Embedding the
weight is divided, whichever way, so its share is the same; a bias is divided with `colwise` alone. What the plan does
not name each rank holds whole. A plan that does not fit the model is refused at its load, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from marserve.option_values import ParallelPlan


def shares(shapes: Mapping[str, Sequence[int]], parallel: ParallelPlan) -> dict[str, int]:
    """How many numbers of each parameter a rank holds: its part of those that are divided, else all of them."""
    ranks = parallel.ranks
    patterns = [(pattern.split("."), style) for pattern, style in parallel.plan.items()]
    return {
        name: -(-prod(shape) // ranks) if _is_divided(name, shape, patterns) else prod(shape)
        for name, shape in shapes.items()
    }


def _is_divided(name: str, shape: Sequence[int], patterns: Sequence[tuple[list[str], str]]) -> bool:
    *module, leaf = name.split(".")
    for pattern, style in patterns:
        if len(pattern) == len(module) and all(map(fnmatchcase, module, pattern)):
            if style == "replicate":
                return False
            return (leaf == "weight" and len(shape) > 1) or (leaf == "bias" and style.startswith("colwise"))
    return False
