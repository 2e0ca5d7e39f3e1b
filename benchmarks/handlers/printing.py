"""A handler that prints without end for a while, or uses as much CPU time and prints nothing."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

FLOOD = "x\n" * 1_000_000
SLICE_S = 0.01


class Printing:
    """Answers with the CPU seconds that were used. A body is `{"seconds": …}`, and `"cpu_s": …` for a silent run."""

    def initialize(self, context: Any) -> None:
        """Nothing to load."""

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[str]:
        """One row in, one answer out."""
        order = json.loads(bytes(rows[0]["body"]))
        before_s = time.process_time()
        end = time.monotonic() + order["seconds"]
        if "cpu_s" in order:
            _burn(end, order["cpu_s"] / order["seconds"])
        else:
            while time.monotonic() < end:
                for begin in range(0, len(FLOOD), 1 << 16):
                    sys.stdout.write(FLOOD[begin : begin + (1 << 16)])
                    if time.monotonic() >= end:
                        break
        return [str(time.process_time() - before_s)] * len(rows)


def _burn(end: float, share: float) -> None:
    """Compute for this share of each slice of time, and sleep for the rest."""
    while time.monotonic() < end:
        begun = time.monotonic()
        while time.monotonic() - begun < share * SLICE_S:
            pass
        time.sleep(max(0.0, begun + SLICE_S - time.monotonic()))
