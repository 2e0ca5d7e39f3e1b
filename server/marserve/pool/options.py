"""How one model version is to be served: effective values, after all precedence. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from marserve.agent_link import ArchiveRef
from marserve.messages import Sample, Tolerance

DEFAULT_TOLERANCE = Tolerance()


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """How requests of one sequence are told, and what bounds sequences; times in seconds.

    A request names its sequence in `id_header`; `start_header: true` begins one, `end_header: true` says that it is the
    last. At most `most` sequences live at a time, of each at most `queue_size` requests wait. A sequence ends after
    `max_idle_s` without a request (0: sequences cannot be served at all), `timeout_s` after its first one (0: never),
    and with `frees_ended` when its last request is answered.
    """

    max_idle_s: float
    timeout_s: float = 0.0
    queue_size: int = 1
    most: int = 1
    frees_ended: bool = False
    id_header: str = "ts_request_sequence_id"
    start_header: str = "ts_request_sequence_start"
    end_header: str = "ts_request_sequence_end"


@dataclass(frozen=True, slots=True)
class RayOptions:
    """What each worker on a Ray cluster is to have for itself, and where: on many nodes (`spread`) or few (`pack`).

    `archive` is what nodes fetch, by its digest; None for a model that has none, a folder of the store.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement: Literal["spread", "pack"] = "spread"
    archive: ArchiveRef | None = None


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Effective values of one model version; times in seconds.

    `max_batch_delay_s` is how long the oldest request waits at most for its batch to fill (with `batch_policy`
    `idle` only while no worker is idle). `response_timeout_s` runs from the moment the worker begins a batch.
    With `halves_without_memory` a batch that ran out of memory is run once more in halves, whatever `batch_isolation`.
    `client_timeout_s` is the longest a request may take from its arrival, None for no limit. `gpu_ids` are given to
    workers in turn; empty means CPU. `default_priority` (0 most urgent, 9 least) is that of requests which name none.
    With `autoscale` the number of workers follows the need. With `min_workers` 0 an `idle_timeout_s` lets the version
    sleep, without workers, after that long without a request (infinity: only when it makes room for another); while
    awake it has `least_awake` workers or more. `latency_goal_s` is what `batch_policy` `goal` keeps to
    at the 95th percentile; with `length_from` its batches are of about one length, at most `padding_budget` padding.

    Bounds of a worker's life, 0 for none: `max_worker_memory_bytes` is what it may hold by itself; it is replaced after
    `max_requests_per_worker` requests, at an age of `max_worker_age_s`, when it has grown by `max_worker_growth_bytes`.
    A slot is given up after `max_restarts` failures in a row (0: no such bound), and for good when its worker exits
    with one of `no_restart_exit_codes`. `on_crash` `fail` has the whole server end when a worker crashes.
    `readiness_rule` says how many loaded workers make the version ready: one, the least number, or all there should be.

    With `parallel_level` a worker has that many of `gpu_ids`, next to each other, and with a `parallel_type` other than
    `custom` it is a group of so many processes with `rank_threads` threads each (0: a fair share). `most_workers` is
    how many the devices are enough for, 0 for any number.

    With `sequences` the requests of one sequence go to one worker, one at a time. With `continuous_batching` a worker
    is called again with the same requests until each has ended, and others join them. With `is_concurrent` a worker
    has up to `most_concurrent` requests at once and ends them in any order.

    `python` is the interpreter of the model's own virtual environment, empty for the server's; with
    `may_share_imports` off, its packages must not meet those that were imported for many models.

    Of memory, in bytes: `memory_bytes` is what the version needs with one worker, as it is declared, None where nobody
    said; `weight_bytes` what its weights take as files. What `is_pinned` never makes room for another model.
    `device_memory_bytes` is what a worker takes on each of its devices, as it is declared. With `stays_near` workers
    keep to the processors near their devices.

    With `ray` workers run on the nodes of a Ray cluster.

    `samples` are inputs that `batch_check` compares batches with (`pool/checks/certificate.py`); `batch_check_sample`
    is the share of served batches that is run again item by item, 0 for none.
    """

    model: str
    version: str
    min_workers: int
    max_workers: int
    batch_size: int = 1
    max_batch_delay_s: float = 0.1
    batch_policy: Literal["idle", "fixed", "goal"] = "idle"
    response_timeout_s: float = 120.0
    startup_timeout_s: float = 120.0
    client_timeout_s: float | None = None
    queue_size: int = 100
    use_job_ticket: bool = False
    max_retry_timeout_s: float = 300.0
    retry_failed_every_s: float = 300.0
    retry_on_worker_death: bool = True
    batch_isolation: bool = True
    halves_without_memory: bool = True
    worker_start: Literal["auto", "fork", "fresh"] = "auto"
    gpu_ids: tuple[int, ...] = ()
    parallel_type: Literal["pp", "tp", "pptp", "custom"] | None = None
    parallel_level: int = 0
    rank_threads: int = 0
    most_workers: int = 0
    latency_goal_s: float | None = None
    length_from: str | None = None
    padding_budget: float = 0.25
    autoscale: bool = False
    idle_timeout_s: float | None = None
    least_awake: int = 1
    memory_bytes: int | None = None
    weight_bytes: int = 0
    is_pinned: bool = False
    device_memory_bytes: int | None = None
    stays_near: bool = False
    default_priority: int = 5
    max_worker_memory_bytes: int = 0
    max_requests_per_worker: int = 0
    max_worker_age_s: float = 0.0
    max_worker_growth_bytes: int = 0
    max_restarts: int = 0
    no_restart_exit_codes: tuple[int, ...] = ()
    on_crash: Literal["retry", "fail"] = "retry"
    readiness_rule: Literal["any", "min", "all"] = "any"
    python: str = ""
    may_share_imports: bool = True
    samples: tuple[Sample, ...] = ()
    batch_check: Literal["off", "warn", "refuse"] = "off"
    batch_check_sample: float = 0.0
    batch_tolerance: Tolerance = DEFAULT_TOLERANCE
    sequences: SequenceOptions | None = None
    continuous_batching: bool = False
    is_concurrent: bool = False
    most_concurrent: int = 1000
    ray: RayOptions | None = None

    @property
    def ranks(self) -> int:
        """How many processes a worker is, 0 where it is no group of them."""
        return self.parallel_level if self.parallel_type not in (None, "custom") else 0
