"""A workload in a plain loop, with no server around it: the most that a server could do with one worker.

    python plain_loop.py WORK FOLDER BODY_FILE

Loads it, says `ready`, and for each line `BATCH SECONDS` it reads calls it again and again with BATCH copies of the
body for SECONDS, encodes each answer as marserve's worker does, and writes one JSON object: items `per_second`, and
the median time of a call, `p50_ms`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from marserve.worker.outgoing import encode_value

sys.path.append(str(Path(__file__).parents[1] / "handlers"))


def loop() -> None:
    """Serve standard input until it ends."""
    from workload import open_work

    work = open_work(sys.argv[1], Path(sys.argv[2]))
    body = Path(sys.argv[3]).read_bytes()
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        batch, seconds = [body] * int(words[0]), float(words[1])
        took = []
        ends = perf_counter() + seconds
        while (began := perf_counter()) < ends:
            for answer in work(batch):
                encode_value(answer)
            took.append(perf_counter() - began)
        seen = {"per_second": len(took) * len(batch) / sum(took), "p50_ms": median(took) * 1e3}
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    loop()
