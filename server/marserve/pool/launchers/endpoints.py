"""The descriptors that a worker starts with: its ends of the wire and of its two output pipes, and the shared page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerEnds:
    """The worker's ends. A launcher hands copies over; the caller keeps these, and closes them after the launch."""

    wire: int
    out: int
    err: int
    page: int
