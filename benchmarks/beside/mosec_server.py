"""mosec around one of the workloads of `handlers/workload.py`, as its documentation sets it up.

Run by mosec's own interpreter. mosec reads the command line, so what to serve stands in the environment: MEASURE_WORK,
MEASURE_FOLDER (of the model's files), MEASURE_BATCH, MEASURE_DELAY_MS.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mosec import Server, Worker

sys.path.append(str(Path(__file__).parents[1] / "handlers"))

WORK = os.environ["MEASURE_WORK"]
FOLDER = Path(os.environ["MEASURE_FOLDER"])
BATCH = int(os.environ["MEASURE_BATCH"])
DELAY_MS = int(os.environ["MEASURE_DELAY_MS"])


class Work(Worker):
    """Bodies in; bytes, or JSON, out."""

    def __init__(self) -> None:
        super().__init__()
        from workload import open_work

        self.work = open_work(WORK, FOLDER)

    def deserialize(self, data: bytes) -> bytes:
        """The workload reads bodies itself, as the others' do."""
        return data

    def serialize(self, data: Any) -> bytes:
        """An answer's bytes."""
        return data if isinstance(data, bytes) else json.dumps(data).encode()

    def forward(self, data: Any) -> Any:
        """With batches mosec passes a list and wants one, without it passes the item."""
        return self.work(data) if BATCH > 1 else self.work([data])[0]


if __name__ == "__main__":
    server = Server()
    if BATCH > 1:
        server.append_worker(Work, num=1, max_batch_size=BATCH, max_wait_time=DELAY_MS, timeout=60)
    else:
        server.append_worker(Work, num=1, timeout=60)
    server.run()
