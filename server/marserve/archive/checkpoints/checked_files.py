"""The pickles of an archive, checked with those in the checkpoints of torch.distributed.checkpoint that lie in it.

Each file of such a checkpoint is many files of `torch.save` one behind the other, and `.metadata` says where each
begins. So each is checked alone, and `.metadata` by `dcp_metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from marserve.archive.checkpoints.contents import BadCheckpoint
from marserve.archive.checkpoints.dcp_metadata import METADATA, is_dcp, read_dcp
from marserve.archive.pickles.check_budget import CheckBudget, CheckStopped
from marserve.archive.pickles.pickle_check import check_files, list_files
from marserve.errors import Draining


def _never() -> bool:
    return False


def check_archive(folder: Path, *, trusted: bool = False, is_stopped: Callable[[], bool] = _never) -> list[str]:
    """Check every pickle in the unpacked archive at `folder`; blocks.

    Raises and returns what `check_folder` does, and raises BadCheckpoint for a checkpoint in it that cannot be read,
    unless the archive is `trusted`.
    """
    return check_members(list(list_files(folder)), trusted=trusted, is_stopped=is_stopped)


def check_members(
    files: Iterable[tuple[str, Path]], *, trusted: bool = False, is_stopped: Callable[[], bool] = _never
) -> list[str]:
    """Check files like `check_archive` does, given as pairs of the member's name and where it lies."""
    members = list(files)
    slices: dict[str, Sequence[tuple[int, int]]] = {}
    for name, path in members:
        if path.name == METADATA and is_dcp(path):
            try:
                read = read_dcp(path.parent, CheckBudget(is_stopped=is_stopped))
            except CheckStopped:
                raise Draining from None
            except BadCheckpoint:
                if trusted:
                    continue  # what is wrong is found below
                raise
            above = name.removesuffix(METADATA)
            slices[name] = ()
            for file, parts in read.files.items():
                slices[above + file] = [(part.offset, part.offset + part.length) for part in parts]
    return check_files(members, trusted=trusted, is_stopped=is_stopped, slices=slices)
