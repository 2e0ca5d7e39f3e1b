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


def test_pieces_are_put_together_in_files_that_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the whole is in no memory of its own; where there is no room for files it is."""
    from marserve_handlers.sharding import checkpoint_weights

    state = {"w": torch.arange(24.0).reshape(6, 4), "n": torch.tensor(3)}
    source = checkpoint_weights.CheckpointWeights(as_workers_get_it(save_in_pieces(tmp_path / "weights", state, 2)))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(checkpoint_weights.tempfile, "tempdir", str(tmp_path / "temporary"))

    mapped = source.read_all()
    assert "(deleted)" in Path("/proc/self/maps").read_text().split(str(tmp_path / "temporary"))[1].splitlines()[0]
    assert list((tmp_path / "temporary").iterdir()) == []
    assert checkpoint_weights.in_a_file(torch.float32, (0, 4)).shape == (0, 4)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_weights.os, "posix_fallocate", full)
    for whole in (mapped, source.read_all()):
        assert all(torch.equal(whole[name], state[name]) for name in state)
