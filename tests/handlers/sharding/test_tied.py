"""Tests for parameters with several names."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_ties_are_found_and_made_again() -> None:
    """Of parameters and buffers, however deep."""
    from marserve_handlers.sharding.tied import find_ties, first_saved, tie

    inner = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(torch.nn.Sequential(inner), torch.nn.Linear(2, 2))
    model[1].weight = inner.weight
    model.register_buffer("here", torch.ones(1))
    model.register_buffer("there", model.here)

    ties = find_ties(model)
    leading = first_saved(ties, {"1.weight": 1, "here": 1, "there": 1})
    model[0][0].weight = torch.nn.Parameter(torch.zeros(2, 2))
    model.there = torch.zeros(1)
    tie(model, leading)

    assert ties == [["0.0.weight", "1.weight"], ["here", "there"]]
    assert leading == {"0.0.weight": "1.weight", "there": "here"}
    assert model[0][0].weight is model[1].weight
    assert model.there is model.here
