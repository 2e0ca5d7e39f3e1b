"""A folder's checkpoint: that of torch.distributed.checkpoint, or safetensors files, whichever lies there."""

from __future__ import annotations

from pathlib import Path

from marserve.archive.checkpoints.contents import BadCheckpoint, Checkpoint
from marserve.archive.checkpoints.dcp_metadata import METADATA, read_dcp
from marserve.archive.checkpoints.safetensors_index import find_files, read_safetensors
from marserve.archive.pickles.check_budget import CheckBudget
from marserve.files.regular import why_not_regular


def read_checkpoint(folder: Path, budget: CheckBudget | None = None) -> Checkpoint:
    """What the folder holds, by its headers. Blocks. Raises BadCheckpoint, OSError; CheckStopped by the budget."""
    if not folder.is_dir():
        raise BadCheckpoint(folder.name, "there is no such folder")
    index, files = find_files(folder)
    is_dcp = why_not_regular(folder / METADATA) == ""
    if is_dcp and (index is not None or files):
        raise BadCheckpoint(METADATA, f"beside it is {index or files[0]}, of another checkpoint; leave one of the two")
    if is_dcp:
        return read_dcp(folder, budget)
    if index is None and not files:
        raise BadCheckpoint(
            folder.name,
            "it holds neither .metadata, as torch.distributed.checkpoint writes it, nor .safetensors files",
        )
    return read_safetensors(folder)
