"""A server's scratch folder goes with it; a killed server's goes with the next one's start."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


KILLED_WHILE_DELETING = """
import os, shutil, sys
from pathlib import Path
from marserve.registry.intake import scratch
real = shutil.rmtree
def killed(path, **options):
    if Path(path) == Path(sys.argv[2]):  # nothing but the lock is left
        os.kill(os.getpid(), 9)
    (Path(path) / "weights").unlink()
    if "models" in str(path) and sys.argv[3] == "early":
        os.kill(os.getpid(), 9)
    real(path, **options)
scratch.shutil.rmtree = killed
scratch.remove_orphans(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("moment", ["early", "late"])
def test_a_start_that_is_killed_while_it_deletes_a_folder_leaves_it_to_the_next_one(
    tmp_path: Path, moment: str
) -> None:
    """The lock by which it is found goes last."""
    done = subprocess.run([sys.executable, "-c", LEAVE_ONE, str(tmp_path)], capture_output=True, text=True, check=False)
    orphan = Path(done.stdout.strip())
    arguments = [sys.executable, "-c", KILLED_WHILE_DELETING, str(tmp_path), str(orphan), moment]
    killed = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (orphan / "models" / "weights").exists()

    assert remove_orphans(tmp_path) == [orphan]

    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_deleted_keeps_its_lock_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a program still writes there."""
    scratch = Scratch(tmp_path)
    (scratch.path / "models").mkdir()
    real = shutil.rmtree
    monkeypatch.setattr("marserve.registry.intake.scratch.shutil.rmtree", lambda path, ignore_errors=False: None)

    scratch.remove()
    monkeypatch.setattr("marserve.registry.intake.scratch.shutil.rmtree", real)

    assert (scratch.path / "models").is_dir()
    assert remove_orphans(tmp_path) == [scratch.path]


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
