"""Counts what a model takes in a process of its own, so that the worker goes on answering.

In the worker counting would take seconds of the interpreter's lock from what is served: torch's counter loads much on
its first use. And what ends this process, an operator that cannot bear tensors without numbers say, ends no worker.
Processes of a machine count one after the other: each of them loads torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marserve_handlers.flops.cost import NotCounted
from marserve_handlers.support.comparing.held_models import is_session

if TYPE_CHECKING:
    from marserve_handlers.flops.counting import Counted, Seen

MODULE, SCRIPT, GRAPH = "module", "script", "graph"
LIMIT_S = 1800.0  # waiting for processors and for the processes before it included
CPU_LIMIT_S = 120
NICENESS = 10  # as that which measures the peak; with 19 it would get a fiftieth of a busy processor
MOST_SAID = 300  # characters
_ROOT = str(Path(__file__).resolve().parents[2])
# -I: no variable and no file of the model's folder takes part before the path is the worker's.
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from marserve_handlers.flops.apart import main; main()"


class _Pickler(pickle.Pickler):
    """Writes an array without numbers as its dtype and shape."""

    def reducer_override(self, value: Any) -> Any:
        if type(value).__name__ == "ndarray" and value.ndim and not any(value.strides):
            return _array, (value.dtype.str, value.shape)
        return NotImplemented


def _array(dtype: str, shape: tuple[int, ...]) -> Any:
    """An array of that shape that takes no memory."""
    import numpy as np  # here: the path to it is known only when the process has read what to count

    return np.broadcast_to(np.empty((), dtype), shape)


def pack(model: Any, path: str, batches: Sequence[Seen]) -> bytes:
    """A model, as its file or a copy without numbers, with the batches that were seen. Raises NotCounted."""
    copied: Any = None
    libraries: list[str] = []
    kind = GRAPH
    if not is_session(model):
        torch = sys.modules["torch"]
        libraries = sorted(torch.ops.loaded_libraries)
        kind = SCRIPT if isinstance(model, torch.jit.ScriptModule) else MODULE
    if kind == MODULE:
        from marserve_handlers.flops.modules import packable_copy  # here: a session's process need not have torch

        copied = packable_copy(model)
    written = io.BytesIO()
    try:
        _Pickler(written, pickle.HIGHEST_PROTOCOL).dump((copied, list(batches)))
    except Exception as error:  # pickle's, and the author's objects'
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:MOST_SAID]}"
        raise NotCounted(f"the model cannot be given to the process that counts ({said})") from None
    return pickle.dumps((sys.path, kind, path, libraries, written.getvalue()))


def count_apart(packed: bytes) -> Counted:
    """Have a process count what `pack` made. Raises NotCounted, with its reason."""
    from marserve_handlers.flops.counting import read_document  # here: this module is the process's, too

    command = [sys.executable, "-I", "-c", _PROGRAM, _ROOT, str(NICENESS)]
    try:
        done = subprocess.run(command, input=packed, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotCounted(f"it was not counted within {LIMIT_S:.0f} s") from None
    except OSError as error:
        raise NotCounted(f"the process that counts does not start ({error})") from None
    if done.returncode < 0:
        raise NotCounted(f"the process that counts was ended by {_named(-done.returncode)}")
    last = done.stdout.splitlines()[-1:]
    try:
        said: Mapping[str, Any] = json.loads(last[0])
        if "why_not" in said:
            raise NotCounted(str(said["why_not"]))
        return read_document(said)
    except (IndexError, ValueError, KeyError, TypeError):
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise NotCounted(f"the process that counts failed: {words[0][:MOST_SAID]}") from None


def _named(number: int) -> str:
    if number == signal.SIGXCPU:
        return f"its limit of {CPU_LIMIT_S} s of a processor"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def counted(packed: bytes) -> Counted:
    """Count what `pack` made, in this process, whose path becomes the worker's. Raises NotCounted."""
    path_of_worker, kind, path, libraries, written = pickle.loads(packed)  # noqa: S301 (the worker wrote it)
    sys.path[:] = path_of_worker
    # Here, as all that follows: numpy and torch may be the model's own, which only that path leads to.
    from marserve_handlers.flops.counting import count

    with open(__file__, "rb") as one:  # a file that is there, so that none is left
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(one, fcntl.LOCK_EX)
        if kind == GRAPH:
            from marserve_handlers.flops.graphs import CountedGraph  # here: a module need not have onnx

            return count(CountedGraph(path), pickle.loads(written)[1])  # noqa: S301 (as above)
        import torch

        from marserve_handlers.flops.modules import CountedModule  # here: a graph need not have torch

        for library in libraries:
            with contextlib.suppress(OSError, RuntimeError):  # then the operators that it has are missing, and named
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        copied, batches = pickle.loads(written)  # noqa: S301 (as above)
        return count(CountedModule(copied, path), batches)


def main() -> None:
    """Read what `pack` made, and print what it takes, or why that is not known, as the last line."""
    signal.alarm(int(LIMIT_S))  # the worker may have ended
    with contextlib.suppress(OSError, AttributeError):
        os.nice(int(sys.argv[2]))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))
    with contextlib.suppress(OSError):  # if memory runs out, rather this process than the worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    said = _said(sys.stdin.buffer.read())
    sys.stdout.write(f"\n{json.dumps(said)}\n")


def _said(packed: bytes) -> dict[str, Any]:
    try:
        found = counted(packed)
    except NotCounted as error:
        return {"why_not": str(error)}
    except Exception as error:  # a library's, or of the author's modules when they are imported
        return {"why_not": f"{type(error).__name__}: {str(error)[:MOST_SAID]}"}
    from marserve_handlers.flops.counting import as_document  # here: as above

    return as_document(found)
