"""Whether a trace still does what its class does, before it is packed: found by a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from marserve.errors import CannotArchive

COMPARE_S = 600.0
_MOST_FAULTS = 3


class Said(msgspec.Struct):
    """What that process says: why nothing was compared, or what was off and which lines torch warns of."""

    runs: int = 0
    faults: list[str] = []
    lines: list[str] = []
    fault: str = ""


def check_trace(trace: Path, traced_from: str, samples: Sequence[Path]) -> list[str]:
    """Compare a trace with its class; warnings about lines that are baked and did not show. Blocks.

    `traced_from` is a Python file, with `:NAME` of a class, or of a function that makes the module, where the file has
    several. Raises CannotArchive for what cannot be compared, and for a trace that is off, with the author's lines.
    """
    file, _, name = traced_from.partition(":")
    for path, what in [(trace, "trace"), (Path(file), "Python file"), *((sample, "sample") for sample in samples)]:
        if not path.is_file():
            raise CannotArchive(f"There is no {what} {path}.")
    said = _ask([str(trace), str(Path(file).resolve()), name, *map(str, samples)])
    if said.fault:
        raise CannotArchive(f"{trace} cannot be compared with {traced_from}: {said.fault.rstrip('.')}.")
    where = "; ".join(said.lines)
    if not said.faults:
        baked = (
            f"{trace.name} answers as {traced_from} in {said.runs} runs, and yet it bakes how its example went: {where}"
        )
        return [baked] if said.lines else []
    faults = "; ".join(said.faults[:_MOST_FAULTS])
    more = f"; and in {len(said.faults) - _MOST_FAULTS} further runs" if len(said.faults) > _MOST_FAULTS else ""
    why = f" A trace bakes the way that its example went: {where}." if said.lines else ""
    raise CannotArchive(
        f"{trace} does not answer as {traced_from} in {len(said.faults)} of {said.runs} runs: {faults}{more}.{why} "
        "Use torch.jit.script or torch.export for it, or pack the class with its weights."
    )


def _ask(arguments: list[str]) -> Said:
    command = [sys.executable, "-P", "-m", "marserve.worker.without_server.traced", str(os.getpid()), *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        said, printed = process.communicate(timeout=COMPARE_S)
    except subprocess.TimeoutExpired:
        return Said(fault=f"that did not end within {COMPARE_S:g} s")
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        return msgspec.json.decode(said, type=Said)
    except msgspec.DecodeError:
        last = printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
        return Said(fault=f"its process ended with status {process.returncode}{last and f': {last}'}")
