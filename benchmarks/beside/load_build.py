"""Loads the build of an optimised archive as a worker does, and says how long that and its check took.

    python load_build.py FOLDER     the unpacked archive

Prints JSON: `load_s` from the start of the process until the build is loaded and checked, imports included, `check_s`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from marserve_handlers.runtimes import optimised


def main(folder: str) -> None:
    """Load it with one thread."""
    check_s = 0.0
    check: Any = optimised._check

    def timed(*words: Any) -> Any:
        nonlocal check_s
        began = time.perf_counter()
        try:
            return check(*words)
        finally:
            check_s += time.perf_counter() - began

    vars(optimised)["_check"] = timed
    proof = json.loads(Path(folder, optimised.PROOF).read_text())
    optimised._load(Path(folder, optimised.FOLDER), proof["build"], proof, _no_parent, 1)
    print(json.dumps({"load_s": time.time() - psutil.Process().create_time(), "check_s": check_s}))


def _no_parent() -> Any:
    raise SystemExit("this build needs its parent: measure another one")


if __name__ == "__main__":
    main(sys.argv[1])
