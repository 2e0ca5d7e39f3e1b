"""The descriptors that a worker is born with: its ends of the wire and of its two output pipes, and the shared page."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(slots=True)
class WorkerEnds:
    """The worker's ends. The launcher hands copies over; `close()` closes the server's, any number of times."""

    wire: int
    out: int
    err: int
    page: int
    is_closed: bool = False

    def close(self) -> None:
        """Close all four here: the worker has its own by now, or never will."""
        if not self.is_closed:
            self.is_closed = True
            for descriptor in (self.wire, self.out, self.err, self.page):
                os.close(descriptor)
