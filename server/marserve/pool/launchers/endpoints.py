"""The descriptors that a worker is born with: its ends of the wire and of its two output pipes, and the shared page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerEnds:
    """The worker's ends. A launcher hands copies over; these stay the caller's, who closes them after the launch."""

    wire: int
    out: int
    err: int
    page: int
