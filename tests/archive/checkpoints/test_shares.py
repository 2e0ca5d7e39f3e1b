"""How much of a model each rank holds, as the handlers divide it."""

from __future__ import annotations

import pytest

from marserve.archive.checkpoints.shares import shares
from marserve.option_values import ParallelPlan
from marserve_handlers.sharding.plan import EMBEDDING, LINEAR, Module, bytes_of_a_rank, divide

MODULES = [
    Module("embed", EMBEDDING, {"weight": (12, 8)}),
    Module("layers.0.norm", "LayerNorm", {"weight": (8,), "bias": (8,)}),
    Module("layers.0.up", LINEAR, {"weight": (32, 8), "bias": (32,)}),
    Module("layers.0.down", LINEAR, {"weight": (8, 32), "bias": (8,)}),
    Module("head", LINEAR, {"weight": (16, 8), "bias": (16,)}),
]
SHAPES = {f"{module.name}.{leaf}": shape for module in MODULES for leaf, shape in module.shapes.items()}
PAIR = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def test_weights_are_divided_and_biases_with_what_is_given_alone() -> None:
    """Norms, buffers, and what the plan does not name or replicates, are whole."""
    plan = ParallelPlan({"data": 1, "tp": 2}, PAIR | {"embed": "rowwise", "head": "replicate"})

    assert shares({**SHAPES, "count": ()}, plan) == {
        "embed.weight": 48,
        "layers.0.norm.weight": 8,
        "layers.0.norm.bias": 8,
        "layers.0.up.weight": 128,
        "layers.0.up.bias": 16,
        "layers.0.down.weight": 128,
        "layers.0.down.bias": 8,
        "head.weight": 128,
        "head.bias": 16,
        "count": 1,
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("more", [{}, {"embed": "rowwise"}, {"embed": "colwise_rep"}, {"head": "colwise_rep"}])
def test_they_are_what_the_handlers_divide(ranks: int, more: dict[str, str]) -> None:
    """Which know the classes of modules."""
    plan = PAIR | more

    held = sum(shares(SHAPES, ParallelPlan({"tp": ranks}, plan)).values())

    assert 4 * held == bytes_of_a_rank(MODULES, divide(MODULES, plan, ranks))


def test_a_part_that_is_not_even_counts_as_the_largest() -> None:
    """An estimate is no smaller than what a rank takes."""
    assert shares({"up.weight": (5, 1)}, ParallelPlan({"tp": 2}, {"up": "colwise"})) == {"up.weight": 3}
