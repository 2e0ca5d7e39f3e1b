"""A `marserve run` in a folder, as a person starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

LIMIT_S = 60.0


class Run:
    """A `marserve run` in a folder, with a temporary folder of its own. As a context it ends by Ctrl-C."""

    def __init__(self, folder: Path, *arguments: str, **more: str) -> None:
        """`more` are further variables."""
        self.folder, self.temporary = folder, folder.parent / "temporary"
        self.temporary.mkdir(exist_ok=True)
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("MARSERVE_", "TS_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "marserve.cli", "run", *arguments, "--port", "0"],
            cwd=folder,
            env={**variables, "TMPDIR": str(self.temporary), "PYTHONUNBUFFERED": "1", **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def wait_for(self, pattern: str, since: int = 0) -> re.Match[str]:
        """The first line with the pattern, from this one on."""
        end = time.monotonic() + LIMIT_S
        with self._more:
            while True:
                for line in self.lines[since:]:
                    if found := re.search(pattern, line):
                        return found
                assert self._reader.is_alive(), "\n".join(self.lines)
                assert self._more.wait(end - time.monotonic()), "\n".join(self.lines)

    @property
    def url(self) -> str:
        """Where the model answers, once it does."""
        return self.wait_for(r"(http://\S+/predictions/\S+)")[1]

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return status

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
