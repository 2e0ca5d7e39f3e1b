"""The file with the process id of the running server, and the check whether that process still is one.

The kernel reuses process ids. So a running server has a word in its command line, `org.pytorch.serve.ModelServer` or
`marserve.server`, and an id counts only while its process has that word.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

from marserve.errors import BadSettings
from marserve.files.atomic import Part, sweep
from marserve.files.locks import is_at, lock

TORCHSERVE_WORD = "org.pytorch.serve.ModelServer"
MARSERVE_WORD = "marserve.server"
LOOK_EVERY_S = 0.05


class AlreadyRunning(Exception):
    """The file belongs to a running server, the process `pid`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        super().__init__(f"a server runs already as process {pid}")


class PidFile:
    """One server's file: at most one running process holds it.

    `word` is the word in the command line of such a process.
    """

    def __init__(self, path: Path, word: str) -> None:
        self.path = path
        self.word = word

    def written_pid(self) -> int | None:
        """The process id in the file, whether it runs or not; None without a file or without a number in it."""
        try:
            return int(self.path.read_text("ascii").strip())
        except (OSError, ValueError):
            return None

    def running_pid(self) -> int | None:
        """The process id of the server that holds the file now, or None."""
        pid = self.written_pid()
        return pid if pid is not None and self.is_server(pid) else None

    def is_server(self, pid: int) -> bool:
        """Whether that process runs and is a server of this kind. A zombie has no command line and does not count."""
        return pid > 0 and self.word in _command_line(pid)

    def claim(self, pid: int) -> bool:
        """Put `pid` into the file; returns True if a dead server's file had to be removed first.

        Raises AlreadyRunning if another server holds the file, BadSettings if it cannot be written. The file appears
        with its content or not at all, so that a reader never sees half of it.
        """
        try:
            return self._claim(pid)
        except OSError as error:
            raise BadSettings(
                f"{self.path}, where the server's process id is kept, cannot be written ({error.strerror}); set TMPDIR "
                "to a folder that can be"
            ) from error

    def _claim(self, pid: int) -> bool:
        removed_orphan = False
        sweep(self.path.parent)  # of servers that were killed while they wrote theirs
        with Part(self.path.parent) as part:
            with part.open() as file:
                file.write(f"{pid}\n".encode("ascii"))
            os.fchmod(part.descriptor, 0o644)
            while True:
                try:
                    part.link(self.path)
                    return removed_orphan
                except FileExistsError:
                    if self.running_pid() == pid:
                        return removed_orphan
                    removed_orphan |= self.remove_orphan(pid)

    def remove_orphan(self, own_pid: int) -> bool:
        """Remove the file of a server that has ended; returns whether there was one.

        Raises AlreadyRunning if the file's server runs, unless that is process `own_pid`.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            # Two commands may find the same orphan; the slower one must not remove the faster one's new file.
            lock(file.fileno())
            if not is_at(self.path, file.fileno()):
                return False
            running = self.running_pid()
            if running == own_pid:
                return False
            if running is not None:
                raise AlreadyRunning(running)
            self.path.unlink(missing_ok=True)
            return True

    def wait_until_ended(self, pid: int, within_s: float) -> bool:
        """Wait until `pid` is no such server any more; False if it still is after so long."""
        deadline = time.monotonic() + within_s
        while self.is_server(pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def release(self, pid: int) -> None:
        """Remove the file if it still holds `pid`; a successor's file stays."""
        if self.written_pid() == pid:
            self.path.unlink(missing_ok=True)


def torchserve_pid_file() -> PidFile:
    """TorchServe's file: one server per temporary folder."""
    return PidFile(_temporary_folder() / ".model_server.pid", TORCHSERVE_WORD)


def marserve_pid_file(management_address: str) -> PidFile:
    """The file of the marserve server with this management address, so that several can run side by side."""
    place = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in management_address)
    return PidFile(_temporary_folder() / f".marserve-{place}.pid", MARSERVE_WORD)


def _temporary_folder() -> Path:
    """The system's. Raises BadSettings if none can be written, as under a read-only root."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise BadSettings(
            f"{error.strerror}: the server's process id is kept in one; set TMPDIR to a folder that can be written",
            source="TMPDIR",
        ) from None


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        if Path("/proc/self").exists():
            return ""
    # Without /proc (macOS), `ps` knows.
    asked = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return asked.stdout
