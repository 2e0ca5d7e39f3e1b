"""py-spy beside a worker: samples its Python from outside, as a thread in the worker gets no turn while it computes.

The program is optional. Where it is not installed, or may not look into the worker, there are no samples, but a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

RATE: Final = 100
NICENESS: Final = 10
MOST_BYTES: Final = 8 << 20
# How long it has to write after it was interrupted.
ENDS_WITHIN_S: Final = 10.0
_NOT_THERE: Final = "py-spy is not installed; `pip install py-spy` beside the server has it sample Python"


def find_program() -> str | None:
    """The program beside the interpreter, or on the path; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


class PySpy:
    """One process that is sampled, from `begin` to `end`. `program` is found if it is not given."""

    def __init__(self, program: str | None = None) -> None:
        self._program = program or find_program()
        self._process: asyncio.subprocess.Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._why_not = ""

    async def begin(self, pid: int, seconds: float) -> None:
        """Sample this process, for so long at most."""
        if self._program is None:
            self._why_not = _NOT_THERE
            return
        self._folder = tempfile.TemporaryDirectory(prefix="marserve-py-spy-")
        words = ["record", "--pid", str(pid), "--duration", str(max(1, round(seconds))), "--rate", str(RATE)]
        words += ["--format", "raw", "--nonblocking", "--output", str(self._output)]
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._program,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._why_not = f"{self._program} cannot be started: {error.strerror}"
            return
        with contextlib.suppress(OSError):  # other models' workers come first
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)

    async def end(self) -> tuple[str, str]:
        """Stop sampling: the stacks as py-spy writes them, and the reason why there are none, or ""."""
        process = self._process
        if process is None:
            return "", self._why_not
        assert process.stderr is not None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                said = await process.stderr.read(1 << 16)
                await process.wait()
        except TimeoutError:
            return "", f"py-spy did not end within {ENDS_WITHIN_S:g} s"
        stacks = await asyncio.to_thread(self._read)
        if stacks:
            return stacks, ""
        lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
        if any("denied" in line.lower() or "not permitted" in line.lower() for line in lines):
            return "", "py-spy may not look into the worker: give the server CAP_SYS_PTRACE, or run it as root"
        return "", f"py-spy saw nothing: {lines[-1][:300]}" if lines else "py-spy saw nothing: the worker was idle"

    async def close(self) -> None:
        """End it, whatever it does, and take its folder away."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def _output(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, "stacks")

    def _read(self) -> str:
        try:
            with open(self._output, "rb") as file:
                return file.read(MOST_BYTES).decode(errors="replace")
        except OSError:
            return ""
