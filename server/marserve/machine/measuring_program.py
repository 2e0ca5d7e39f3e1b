"""Runs the operator's own program that measures the machine (`system_metrics_cmd`). Knows no metrics: it returns lines.

The program is Python code, run by the server's interpreter as TorchServe runs it: `python WORDS…`. The lines that it
prints up to its first empty line count. It may hang or leave children behind, so it gets a time limit and a process
group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

MAX_OUTPUT_BYTES = 1024 * 1024


class ProgramFailed(Exception):
    """The program could not be started, failed, took too long or printed too much; the message says which."""


async def run_program(words: Sequence[str], folder: Path, timeout_s: float) -> list[str]:
    """The lines that `python WORDS…`, run in `folder`, prints before an empty one. Raises ProgramFailed."""
    try:
        program = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=folder, start_new_session=True
        )
    except OSError as error:
        raise ProgramFailed(f"cannot be started ({error.strerror})") from error
    try:
        async with asyncio.timeout(timeout_s):
            printed, complaints = await _communicate(program)
            status = await program.wait()
    except TimeoutError:
        raise ProgramFailed(f"did not end within {timeout_s:g} s") from None
    finally:
        await _end(program)
    if status:
        last = complaints.decode(errors="replace").strip().splitlines()[-1:]
        raise ProgramFailed(f"ended with status {status}{': ' + last[0][:500] if last else ''}")
    lines = printed.decode(errors="replace").splitlines()
    return lines[: lines.index("")] if "" in lines else lines


async def _communicate(program: Process) -> tuple[bytes, bytes]:
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stderr is not None
    # TorchServe's program reads the workers' process ids from its standard input; here pools measure workers.
    with contextlib.suppress(OSError):
        program.stdin.write(b"\n")
        await program.stdin.drain()
        program.stdin.close()
    printed, complaints = await asyncio.gather(_read(program.stdout), _read(program.stderr))
    return printed, complaints


async def _read(stream: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await stream.read(64 * 1024):
        size += len(part)
        if size > MAX_OUTPUT_BYTES:
            raise ProgramFailed(f"printed more than {MAX_OUTPUT_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


async def _end(program: Process) -> None:
    """End the program and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)
    await program.wait()
