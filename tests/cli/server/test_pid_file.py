"""The PID file: believed only while its process shows the server's word."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve.cli.server.pid_file import AlreadyRunning, PidFile, marserve_pid_file, torchserve_pid_file
from marserve.errors import BadSettings
from marserve.files.atomic import Part
from support.bystander import bystander

WORD = "marserve.test.server"


@pytest.fixture
def server() -> Iterator[int]:
    """The process id of something that shows the word in its command line, as a server does."""
    with bystander(WORD) as pid:
        yield pid


@pytest.fixture
def gone() -> int:
    """A process id whose process has ended and was reaped."""
    process = subprocess.Popen([sys.executable, "-S", "-X", WORD, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def pid_file(tmp_path: Path) -> PidFile:
    """A PID file that does not exist yet."""
    return PidFile(tmp_path / "server.pid", WORD)


def test_a_missing_file_names_nobody(pid_file: PidFile) -> None:
    """Without a file there is no server, and removing an orphan finds none."""
    assert pid_file.written_pid() is None
    assert pid_file.running_pid() is None
    assert pid_file.remove_orphan(os.getpid()) is False


def test_a_claimed_file_names_the_process_and_leaves_nothing_beside_it(pid_file: PidFile, server: int) -> None:
    """The file holds one line with the id, and the temporary file it was made from is gone."""
    assert pid_file.claim(server) is False

    assert pid_file.path.read_text() == f"{server}\n"
    assert pid_file.running_pid() == server
    assert list(pid_file.path.parent.iterdir()) == [pid_file.path]


def test_what_a_killed_server_left_of_its_file_goes_with_the_next_claim_and_what_is_being_written_stays(
    pid_file: PidFile, server: int
) -> None:
    """The folder is everybody's: only files of this kind that nobody holds."""
    left = pid_file.path.parent / ".0123456789abcdef.part"
    left.write_text("1")
    foreign = pid_file.path.parent / ".other.part"
    foreign.write_text("2")
    with Part(pid_file.path.parent) as writing:
        pid_file.claim(server)

        assert writing.path.exists()
    assert not left.exists()
    assert foreign.exists()


def test_a_full_disk_is_told_with_the_files_name(pid_file: PidFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """And half a file is not left."""

    def fail(part: Part) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Part, "open", fail)
    with pytest.raises(
        BadSettings, match=r"process id is kept, cannot be written \(No space left on device\); set TMPDIR"
    ):
        pid_file.claim(os.getpid())

    assert list(pid_file.path.parent.iterdir()) == []


def test_claiming_twice_for_the_same_process_is_fine(pid_file: PidFile, server: int) -> None:
    """The command that starts a server and the server itself may both claim, in either order."""
    pid_file.claim(server)

    assert pid_file.claim(server) is False


def test_a_running_server_keeps_its_file(pid_file: PidFile, server: int) -> None:
    """A second server is refused and told which process runs; the file is as it was."""
    pid_file.claim(server)

    with pytest.raises(AlreadyRunning) as refused:
        pid_file.claim(os.getpid())

    assert refused.value.pid == server
    assert pid_file.written_pid() == server


def test_the_file_of_a_dead_server_is_replaced(pid_file: PidFile, gone: int, server: int) -> None:
    """An orphan is removed, and the caller learns that it was."""
    pid_file.path.write_text(f"{gone}\n")

    assert pid_file.running_pid() is None
    assert pid_file.claim(server) is True
    assert pid_file.running_pid() == server


def test_a_number_that_belongs_to_another_program_by_now_is_an_orphan(pid_file: PidFile) -> None:
    """Process ids are handed out again: without the word in its command line a process is no server."""
    pid_file.path.write_text(f"{os.getpid()}\n")

    assert pid_file.running_pid() is None
    assert pid_file.remove_orphan(os.getpid()) is True
    assert not pid_file.path.exists()


@pytest.mark.parametrize("content", ["", "no number\n", "-1\n", "0\n"])
def test_a_file_without_a_usable_number_is_an_orphan(pid_file: PidFile, server: int, content: str) -> None:
    """Damage never stops a start, and never makes a process group or every process a target."""
    pid_file.path.write_text(content)

    assert pid_file.running_pid() is None
    assert pid_file.claim(server) is True


def test_only_the_holder_releases_the_file(pid_file: PidFile, server: int) -> None:
    """A server that ends late does not remove its successor's file."""
    pid_file.claim(server)

    pid_file.release(server + 1)
    assert pid_file.path.exists()

    pid_file.release(server)
    assert not pid_file.path.exists()


def test_files_lie_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchServe's name for the one, one file an address for the other."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert torchserve_pid_file().path == tmp_path / ".model_server.pid"
    first, second = (marserve_pid_file(f"http://127.0.0.1:{port}") for port in (8081, 9081))
    assert first.path.parent == tmp_path
    assert first.path != second.path
    assert "/" not in first.path.name
