"""Compares a trace with its class, and writes what it found as JSON.

Its arguments are the process id of its parent, the trace, the Python file, the class's name or nothing, the samples.

For `marserve archive --traced-from`, whose process runs no author's code.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from marserve.worker.process.parent import die_with_parent


def compare(trace: str, source: str, name: str, samples: list[str]) -> dict[str, Any]:
    """The keys are those of `marserve.archive.writing.traced.Said`."""
    try:
        # here: where torch is missing, a sentence says so
        import torch  # noqa: F401
    except ImportError:
        return {"fault": "torch is not installed here, which runs both: pip install torch"}
    # here: it imports torch
    from marserve_handlers.optimising.tracing import CannotCompare, compare_trace

    try:
        found = compare_trace(Path(trace), Path(source), name, [Path(sample) for sample in samples])
    except CannotCompare as error:
        return {"fault": str(error)}
    return {"runs": found.runs, "faults": found.faults, "lines": found.lines}


def main() -> None:
    """Write the result to standard output, which the author's module does not get."""
    if len(sys.argv) < 6:
        sys.exit("marserve.worker.without_server.traced is started by marserve archive")
    die_with_parent(int(sys.argv[1]))
    out = os.dup(1)
    os.dup2(2, 1)
    result = json.dumps(compare(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])).encode()
    with os.fdopen(out, "wb") as file:
        file.write(result)
    sys.stdout.flush()
    os._exit(0)  # threads of the author's module must not keep the process


if __name__ == "__main__":
    main()
