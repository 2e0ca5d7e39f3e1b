"""Tests for reading parts of tensors whose numbers lie in a file one behind the other."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def _drawn(data: st.DataObject) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    ends = [sorted((data.draw(st.integers(0, each)), data.draw(st.integers(0, each)))) for each in shape]
    return tuple(shape), tuple(slice(*each) for each in ends)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_part_is_read_as_if_the_whole_were_sliced(data: st.DataObject) -> None:
    """Of any shape, along any of its dimensions; into a target of another dtype, or one that is no run, too."""
    from marserve_handlers.sharding import stored as module

    shape, part = _drawn(data)
    whole = torch.arange(math.prod(shape), dtype=torch.int16).reshape(shape)
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", data.draw(st.sampled_from([1, 8, 1 << 20])))
        file.write(b"head" + whole.numpy().tobytes())
        file.flush()
        stored = module.Stored(file.name, torch.int16, shape, 4, 4 + whole.nbytes)
        around = torch.zeros([each + 2 for each in whole[part].shape], dtype=torch.int32)
        target: Any = around[tuple(slice(1, each + 1) for each in whole[part].shape)]

        count = module.read_into(file.fileno(), stored, "a", part, target)

        assert torch.equal(module.read_part(stored, "a", part), whole[part])
        assert torch.equal(target, whole[part].int())
        assert around.sum() == whole[part].sum()
        assert count == whole[part].nbytes


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    """By the names of both."""
    from marserve_handlers.sharding.stored import Stored, read_part

    (tmp_path / "w.bin").write_bytes(bytes(30))
    stored = Stored(str(tmp_path / "w.bin"), torch.float32, (2, 4), 0, 32)

    assert read_part(stored, "a", (slice(0, 1), slice(0, 4))).tolist() == [[0, 0, 0, 0]]
    with pytest.raises(EOFError, match=r"^w.bin ends inside of a$"):
        read_part(stored, "a", (slice(0, 2), slice(2, 4)))
