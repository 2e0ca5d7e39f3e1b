"""A server's scratch folder goes with it; a killed server's goes with the next one's start."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from marserve.registry.intake.scratch import Scratch, remove_orphans

LEAVE_ONE = """
import os, sys
from pathlib import Path
from marserve.registry.intake.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.path / "models").mkdir()
(scratch.path / "models" / "weights").write_text("x")
print(scratch.path)
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


def test_a_scratch_folder_is_private_and_is_removed(tmp_path: Path) -> None:
    """Only its owner may enter it; afterwards nothing is left, and removing it again does no harm."""
    scratch = Scratch(tmp_path)
    (scratch.path / "models").mkdir()

    mode = scratch.path.stat().st_mode & 0o777
    scratch.remove()
    scratch.remove()

    assert mode == 0o700
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_server_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    """The lock tells them apart; folders that are none of these are left alone."""
    living = Scratch(tmp_path)
    (tmp_path / "marserve-notes").mkdir()
    done = subprocess.run([sys.executable, "-c", LEAVE_ONE, str(tmp_path)], capture_output=True, text=True, check=False)
    orphan = Path(done.stdout.strip())
    assert orphan.is_dir()

    removed = remove_orphans(tmp_path)

    assert removed == [orphan]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.path.name, "marserve-notes"])
    living.remove()


def test_a_cleaner_of_temporary_folders_leaves_a_living_servers(tmp_path: Path) -> None:
    """It asks for the folder's lock, as systemd-tmpfiles does, and passes by where it cannot have it."""

    def may_clean(folder: Path) -> bool:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)

    scratch = Scratch(tmp_path)
    folder = scratch.path

    assert not may_clean(folder)
    scratch.remove()
    folder.mkdir()
    assert may_clean(folder)
