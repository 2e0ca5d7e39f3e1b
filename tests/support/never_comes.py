"""Files of a file system that is away: a library for `LD_PRELOAD`, by which calls for them never return.

They cannot be interrupted either. It is for paths with `never-comes` in them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("never_comes.c")
NAME = "never-comes"

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)


def build(folder: Path) -> dict[str, str]:
    """The environment in which files of that name hang."""
    library = folder / "never_comes.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}
