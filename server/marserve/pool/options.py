"""How one model version is served: effective values, after all precedence. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from marserve.agent_link import ArchiveRef
from marserve.model_options import ModelOptions
from marserve.option_values import Sample
from marserve.pool.interpreter import Interpreter


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """How requests name their sequence, and what bounds sequences; times in seconds.

    A request names its sequence in `id_header`; `start_header: true` begins a sequence, `end_header: true` marks its
    last request. At most `most` sequences live at a time, and at most `queue_size` requests of each wait. A sequence
    ends after `max_idle_s` without a request (0: sequences cannot be served), `timeout_s` after its first request (0:
    no limit), and with `frees_ended` when its last request is answered.
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
    """The resources of each worker on a Ray cluster, and its placement: on many nodes (`spread`) or few (`pack`).

    `archive` is the file that nodes fetch, by its digest; None for a model that is a folder of the store.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    placement: Literal["spread", "pack"] = "spread"
    archive: ArchiveRef | None = None


@dataclass(frozen=True, slots=True)
class PoolOptions(ModelOptions):
    """`ModelOptions` as they apply on this server; times in seconds. Values that do not apply here are kept as given.

    `max_batch_delay_s` is how long the oldest request waits at most for its batch to fill (with `batch_policy`
    `idle` only while no worker is idle). `response_timeout_s` runs from the moment the worker begins a batch.
    With `halves_without_memory` a batch that ran out of memory is run once more in halves, whatever `batch_isolation`.
    `client_timeout_s` is the longest a request may take from its arrival, None for no limit. `gpu_ids` are given to
    workers in turn; empty means CPU. With `min_workers` 0 an `idle_timeout_s` lets the version sleep, without workers,
    after that long without a request (infinity: only when it makes room for another); while awake it has at least
    `least_awake` workers. `batch_policy` `goal` keeps `latency_goal_s` at the 95th percentile; with `length_from` its
    batches are of about one length, with a share of padding of at most `padding_budget`.

    Bounds of a worker's life are 0 for none. A slot is given up after `max_restarts` failures in a row, and for good
    when its worker exits with one of `no_restart_exit_codes`.

    With `parallel_level` a worker has that many of `gpu_ids`, next to each other. With a `parallel_type` other than
    `custom` it is a group of that many processes with `rank_threads` threads each (0: a fair share). `most_workers` is
    the number of workers that the devices suffice for, 0 for any number.

    With `sequences` the requests of one sequence go to one worker, one at a time. With `continuous_batching` a worker
    is called again with the same requests until each has ended, and others join them. With `is_concurrent` a worker
    has up to `most_concurrent` requests at once and ends them in any order; with `holds_coroutines` it waits where a
    client takes its stream slowly, as a worker does that runs one batch after the other.

    `python` is the interpreter of the model's own virtual environment, empty for the server's; `interpreter` is another
    than the server's that the model names. `program` are the words that start a worker in another language. Without
    `may_share_imports` its workers are not forked from a template that imported packages for several models.

    `memory_bytes` is None if no layer sets it; `weight_bytes` is the size of the version's weights as files. With
    `stays_near` workers keep to the processors near their devices; with `has_own_cores` each keeps to as many as it has
    threads, which it shares with none while there are enough. With `ray` workers run on the nodes of a Ray
    cluster. `samples` are the inputs with which `batch_check` checks batches (`pool/checks/certificate.py`),
    `drawn_samples` stand in for them where the model declares its input.
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
    has_own_cores: bool = False
    python: str = ""
    interpreter: Interpreter | None = None
    program: tuple[str, ...] = ()
    may_share_imports: bool = True
    sequences: SequenceOptions | None = None
    holds_coroutines: bool = False
    ray: RayOptions | None = None
    drawn_samples: tuple[Sample, ...] = ()

    @property
    def inputs_to_try(self) -> tuple[Sample, ...]:
        """The inputs to warm up and to check with: the samples, else what was drawn from the declaration."""
        return self.samples or self.drawn_samples

    @property
    def has_own_python(self) -> bool:
        """Whether its workers run in an environment or under an interpreter of their own, so that none is forked."""
        return bool(self.python) or self.interpreter is not None or bool(self.program)

    @property
    def ranks(self) -> int:
        """How many processes a worker consists of, 0 if it is not a group."""
        return self.parallel_level if self.parallel_type not in (None, "custom") else 0
