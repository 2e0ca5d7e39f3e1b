"""How one model version is to be served: effective values, after all precedence. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from marserve.agent_link import ArchiveRef
from marserve.model_options import ModelOptions


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
class PoolOptions(ModelOptions):
    """What `ModelOptions` come to on this server; times in seconds. Values that it has no use for are as asked.

    `max_batch_delay_s` is how long the oldest request waits at most for its batch to fill (with `batch_policy`
    `idle` only while no worker is idle). `response_timeout_s` runs from the moment the worker begins a batch.
    With `halves_without_memory` a batch that ran out of memory is run once more in halves, whatever `batch_isolation`.
    `client_timeout_s` is the longest a request may take from its arrival, None for no limit. `gpu_ids` are given to
    workers in turn; empty means CPU. With `min_workers` 0 an `idle_timeout_s` lets the version
    sleep, without workers, after that long without a request (infinity: only when it makes room for another); while
    awake it has `least_awake` workers or more. `latency_goal_s` is what `batch_policy` `goal` keeps to
    at the 95th percentile; with `length_from` its batches are of about one length, at most `padding_budget` padding.

    Bounds of a worker's life are 0 for none. A slot is given up after `max_restarts` failures in a row, and for good
    when its worker exits with one of `no_restart_exit_codes`.

    With `parallel_level` a worker has that many of `gpu_ids`, next to each other, and with a `parallel_type` other than
    `custom` it is a group of so many processes with `rank_threads` threads each (0: a fair share). `most_workers` is
    how many the devices are enough for, 0 for any number.

    With `sequences` the requests of one sequence go to one worker, one at a time. With `continuous_batching` a worker
    is called again with the same requests until each has ended, and others join them. With `is_concurrent` a worker
    has up to `most_concurrent` requests at once and ends them in any order.

    `python` is the interpreter of the model's own virtual environment, empty for the server's; with
    `may_share_imports` off, its packages must not meet those that were imported for many models.

    `memory_bytes` is None where no layer says it; `weight_bytes` is what the version's weights take as files. With
    `stays_near` workers keep to the processors near their devices. With `ray` workers run on the nodes of a Ray
    cluster. `samples` are inputs that `batch_check` compares batches with (`pool/checks/certificate.py`).
    """

    model: str
    version: str
    min_workers: int
    max_workers: int
    halves_without_memory: bool = True
    gpu_ids: tuple[int, ...] = ()
    rank_threads: int = 0
    most_workers: int = 0
    least_awake: int = 1
    weight_bytes: int = 0
    stays_near: bool = False
    python: str = ""
    may_share_imports: bool = True
    sequences: SequenceOptions | None = None
    ray: RayOptions | None = None

    @property
    def ranks(self) -> int:
        """How many processes a worker is, 0 where it is no group of them."""
        return self.parallel_level if self.parallel_type not in (None, "custom") else 0
