"""How one model version is to be served: effective values, after all precedence. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Effective values of one model version; times in seconds.

    `max_batch_delay_s` is how long the oldest request waits at most for its batch to fill (with `batch_policy`
    `idle` only while no worker is idle). `response_timeout_s` runs from the moment the worker begins a batch.
    `client_timeout_s` is the longest a request may take from its arrival, None for no limit. `gpu_ids` are given to
    workers in turn; empty means CPU.
    """

    model: str
    version: str
    min_workers: int
    max_workers: int
    batch_size: int = 1
    max_batch_delay_s: float = 0.1
    batch_policy: Literal["idle", "fixed"] = "idle"
    response_timeout_s: float = 120.0
    startup_timeout_s: float = 120.0
    client_timeout_s: float | None = None
    queue_size: int = 100
    use_job_ticket: bool = False
    max_retry_timeout_s: float = 300.0
    retry_failed_every_s: float = 300.0
    retry_on_worker_death: bool = True
    batch_isolation: bool = True
    worker_start: Literal["auto", "fork", "fresh"] = "auto"
    gpu_ids: tuple[int, ...] = ()
