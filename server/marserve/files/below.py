"""Where a name leads that an archive gives, and whether that lies in its folder."""

from __future__ import annotations

import os
from pathlib import Path


def real_below(folder: Path, name: str) -> Path | None:
    """The real path of a name below a folder, past all links; None if it leads out. It need not be there.

    By `os.path`, which takes a name that is too long, and a link to itself, for what is not there; pathlib raises. So
    what is found is asked by `os.path` as well.
    """
    path = Path(os.path.realpath(folder / name))
    return path if path.is_relative_to(os.path.realpath(folder)) else None
