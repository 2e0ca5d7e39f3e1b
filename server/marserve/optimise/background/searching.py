"""One run of the process that searches, from the server. However it ends, no process of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from marserve.lineage import VARIABLE, end_with_family
from marserve.optimise.background.order import PRINTED, TEMPORARY, Order, Said
from marserve.pool.launchers.leftovers import Leftovers

PROGRAM: Final = "marserve.optimise.background.program"
_MOST_LINE: Final = 1 << 16
_MOST_PRINTED: Final = 400


class Searching:
    """Runs searches. `environment` is that of workers."""

    def __init__(self, environment: Mapping[str, str], leftovers: Leftovers) -> None:
        self._environment = environment
        self._leftovers = leftovers

    async def run(self, order: Order, on_step: Callable[[str], None]) -> str:
        """Carry the order out; why it failed, empty for a folder that is whole. May be cancelled. Raises OSError."""
        folder = Path(order.folder)
        (folder / TEMPORARY).mkdir()
        # A lineage of its own: when the server is killed, its workers end all that is of the server's, and this process
        # is to delete its folder first.
        lineage = f"o{secrets.token_hex(8)}"
        environment = {
            **self._environment,
            VARIABLE: lineage,
            "TMPDIR": str(folder / TEMPORARY),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        process: asyncio.subprocess.Process | None = None
        try:
            printed = os.open(folder / PRINTED, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", PROGRAM),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=printed,
                    env=environment,
                    start_new_session=True,
                    limit=_MOST_LINE,
                )
            finally:
                os.close(printed)
            return await self._follow(process, order, on_step)
        finally:
            # Shielded from a second cancel, so that nothing of it is left.
            await asyncio.shield(self._end(process, lineage))

    async def _end(self, process: asyncio.subprocess.Process | None, lineage: str) -> None:
        if process is not None:
            if process.returncode is None:
                await asyncio.to_thread(end_with_family, process.pid)
            await process.wait()
        await self._leftovers.end(lineage)

    async def _follow(self, process: asyncio.subprocess.Process, order: Order, on_step: Callable[[str], None]) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended: its last words say why
            process.stdin.write(await asyncio.to_thread(order.write))
            await process.stdin.drain()
        while line := await process.stdout.readline():
            said = msgspec.json.decode(line, type=Said)
            if said.is_done or said.failed:
                return said.failed
            on_step(said.step)
        status = await process.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        printed = await asyncio.to_thread(_last_words, Path(order.folder, PRINTED))
        return f"the process that searches ended with {how}{f': {printed}' if printed else ''}"


def _last_words(file: Path) -> str:
    try:
        lines = file.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:_MOST_PRINTED] if lines else ""
