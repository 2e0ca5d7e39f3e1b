"""A file system with room for little, and without: what a full disk does to a server, for real."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted file system, and a file that takes what room there is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Take all the room."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(b"\0" * size)
        with pytest.raises(OSError) as full:
            (self.folder / "probe").write_bytes(b"x")
        (self.folder / "probe").unlink()
        assert full.value.errno == errno.ENOSPC

    def empty(self) -> None:
        """Give it back."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[SmallDisk]:
    """A file system of so many KiB in `folder`, which is made. Skips the test where nobody may mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k,mode=0755", "tmpfs", str(folder)]
    if os.geteuid() != 0:
        pytest.skip("only root may mount the small file system that is to be full")
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
