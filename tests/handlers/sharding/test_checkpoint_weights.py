"""Tests for the weights of a checkpoint part by part."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import as_workers_get_it, save_in_pieces

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("kind", "may_map"), [("dcp", False), ("safetensors", False), ("safetensors", True)])
def test_parts_and_the_whole_are_read_from_either_kind(tmp_path: Path, kind: str, may_map: bool) -> None:
    """The bytes of parts are counted."""
    from safetensors.torch import save_file

    from marserve_handlers.sharding.checkpoint_weights import CheckpointWeights

    state = {"w": torch.arange(24.0).reshape(6, 4), "b": torch.ones(3)}
    if kind == "dcp":
        save_in_pieces(tmp_path / "weights", state, 2)
    else:
        (tmp_path / "weights").mkdir()
        save_file(state, tmp_path / "weights" / "model.safetensors")
    source = CheckpointWeights(as_workers_get_it(tmp_path / "weights", may_map=may_map))

    part = source.read("w", (slice(0, 6), slice(2, 4)))

    assert source.shapes() == {"w": (6, 4), "b": (3,)}
    assert torch.equal(part, state["w"][:, 2:])
    assert source.bytes_read == 48
    whole = source.read_all()
    assert all(torch.equal(whole[name], state[name]) for name in state)
