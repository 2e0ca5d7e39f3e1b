"""Tests for the memory that weights take on each rank, by their headers."""

from __future__ import annotations

import pytest
import yaml

from marserve.archive.checkpoints.contents import Saved
from marserve.archive.checkpoints.estimate import estimate, shares_of
from support import divided

TENSORS = {
    "embed.weight": Saved("float16", (64, 8)),
    "layers.0.up.weight": Saved("float16", (32, 8)),
    "layers.0.up.bias": Saved("float16", (32,)),
    "layers.0.down.weight": Saved("float16", (8, 32)),
    "layers.0.down.bias": Saved("float16", (8,)),
    "scale": Saved("float32", (8,)),
}
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "embed": "replicate"}


def test_one_process_holds_everything() -> None:
    """Whatever is in it."""
    found = estimate(TENSORS, {})

    assert found.total == found.a_rank == 64 * 8 * 2 + 2 * (32 * 8 * 2) + 32 * 2 + 8 * 2 + 32
    assert (found.ranks, found.divided) == (1, 0)


def test_ranks_share_what_a_plan_divides() -> None:
    """Of a rowwise module the bias is whole, and so is all that no pattern names."""
    shares, problems = shares_of(TENSORS, PLAN, 4)
    found = estimate(TENSORS, shares, 4)

    assert problems == ()
    assert shares == {"layers.0.up.weight": 4, "layers.0.up.bias": 4, "layers.0.down.weight": 4}
    assert found.divided == (512 + 64 + 512) // 4
    assert found.whole == 1024 + 16 + 32


@pytest.mark.parametrize(
    ("plan", "ranks", "problem"),
    [
        ({"layers.*.upp": "colwise"}, 2, "layers.*.upp matches no module whose weights are there"),
        (
            {"layers.*.up": "colwise"},
            3,
            "'layers.0.up.bias', 'layers.0.up.weight': no dimension that 3 ranks",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_said(plan: dict[str, str], ranks: int, problem: str) -> None:
    """As far as headers show it."""
    _, problems = shares_of(TENSORS, plan, ranks)

    assert len(problems) == 1
    assert problems[0].startswith(problem)


def test_a_pattern_may_name_a_module_with_others_in_it() -> None:
    """As `replicate` does."""
    assert shares_of(TENSORS, {"layers.*": "replicate", "layers": "replicate"}, 2) == ({}, ())


@pytest.mark.torch
def test_it_is_what_the_ranks_hold() -> None:
    """The handlers count the same, with the classes of the modules."""
    pytest.importorskip("torch")
    from marserve_handlers.sharding.parallel import modules_of
    from marserve_handlers.sharding.plan import divide

    plan = yaml.safe_load(divided.PLAN)["plan"]
    whole = divided.build(divided.source())
    modules = list(modules_of(whole))
    tensors = {name: Saved("float32", tuple(tensor.shape)) for name, tensor in whole.named_parameters()}

    for ranks in (2, 4):
        shares, problems = shares_of(tensors, plan, ranks)

        assert problems == ()
        assert estimate(tensors, shares, ranks).a_rank == divided.bytes_of_a_rank(modules, divide(modules, plan, ranks))
