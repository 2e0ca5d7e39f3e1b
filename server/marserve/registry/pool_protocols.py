"""What the registry needs of a pool and of the metrics, no more; `Pool` and `Metrics` have it, and so have the fakes.

A version's pool is made by a factory that the server hands over, so nothing here starts a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from marserve.environments.requirements import Requirements
from marserve.errors import MarserveError
from marserve.messages import Answer, Checked, Load, Part, Receiver, Request, Tolerance
from marserve.pool.dispatch.queue import GivenUp
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics


class JobLike(Protocol):
    """An accepted request."""

    def cancel(self) -> None:
        """The client has gone. May be called at any time, any number of times."""

    def hold(self) -> None:
        """The client does not keep up with its stream. May be called at any time."""

    def resume(self) -> None:
        """The client has caught up. May be called at any time."""

    @property
    def keeps_the_only_worker(self) -> bool:
        """Whether it was cancelled, and the version's only worker still runs it."""


class DeathLike(Protocol):
    """Why and when a worker ended; `at` in seconds since the epoch, UTC."""

    @property
    def cause(self) -> str:
        """The class of cause."""

    @property
    def at(self) -> float:
        """When."""

    @property
    def detail(self) -> str:
        """What is known of it."""

    @property
    def traceback(self) -> str:
        """The author's, empty where there is none."""

    @property
    def last_lines(self) -> Sequence[str]:
        """What the worker printed last, oldest first."""


class WorkerLike(Protocol):
    """One worker slot as it stands now. `started_at` in seconds since the epoch, UTC; `pid` -1 while unknown."""

    @property
    def id(self) -> str:
        """The worker's number."""

    @property
    def started_at(self) -> float:
        """When its slot was made."""

    @property
    def status(self) -> str:
        """READY, LOADING or UNLOADING."""

    @property
    def pid(self) -> int:
        """Its process."""

    @property
    def gpu_id(self) -> int | None:
        """Its accelerator, None on the CPU."""

    @property
    def gpu_usage(self) -> str:
        """What its accelerator is doing, in TorchServe's words."""

    @property
    def ranks(self) -> Sequence[int]:
        """The processes of its ranks, if it is a group of them."""

    @property
    def node(self) -> str:
        """The machine that it is on; empty for the server's own."""

    @property
    def computes_on(self) -> str:
        """What its model runs on, where the handler says so."""

    @property
    def waits_for(self) -> str:
        """What it is not started yet for; empty for nothing."""

    @property
    def devices(self) -> Sequence[int]:
        """Its accelerators, if it has several of its own."""

    @property
    def memory_bytes(self) -> int:
        """Its resident memory."""

    @property
    def restarts(self) -> int:
        """How often it was started again."""

    @property
    def next_start_at(self) -> float | None:
        """When it is tried again after failing, seconds since the epoch; infinity: when it is scaled; else None."""

    @property
    def last_death(self) -> DeathLike | None:
        """The latest end that nobody asked for."""


class PoolLike(Protocol):
    """The workers of one model version."""

    @property
    def options(self) -> PoolOptions:
        """The values it runs with now; batch size and delay may have changed since it was made."""

    @property
    def metrics(self) -> VersionMetrics:
        """Its counts."""

    @property
    def queued(self) -> int:
        """Requests that wait."""

    @property
    def running(self) -> int:
        """Requests that workers have."""

    @property
    def ready_workers(self) -> int:
        """Workers that have loaded the model."""

    @property
    def wanted_workers(self) -> int:
        """Workers that there should be now."""

    @property
    def is_healthy(self) -> bool:
        """Whether it has not given up more slots than it can spare (contract 1.6)."""

    @property
    def last_death(self) -> DeathLike | None:
        """The latest end that nobody asked for."""

    @property
    def described(self) -> Mapping[str, Any]:
        """Members of describe's answer that only the pool knows."""

    @property
    def warnings(self) -> Sequence[str]:
        """Sentences for describe."""

    def start(self) -> None:
        """Begin to start the workers; returns at once."""

    def submit(self, request: Request, receiver: Receiver) -> JobLike:
        """Take a request. Raises NoWorker, QueueFull, NoTicket, Draining, FingerprintRefused."""

    def scale(self, minimum: int, maximum: int) -> None:
        """Begin to have `minimum` to `maximum` workers; dead slots start again; returns at once."""

    async def wait_until_ready(self) -> bool:
        """True once the least number is loaded, False when that is not to be expected soon.

        Raises LoadFailed when a worker could not load the model.
        """

    def reconfigure(self, *, batch_size: int | None = None, max_batch_delay_s: float | None = None) -> None:
        """Form batches by other values from now on; None leaves one as it is."""

    async def check(self, samples: Sequence[list[Part]] = ()) -> dict[str, Any]:
        """Compare batches of these inputs, or of the model's own samples, with single requests; a report.

        Raises BadInput where there are none, NoWorker, Draining, WorkerDied.
        """

    async def compare(self, pairs: Sequence[tuple[Answer, Answer]], tolerance: Tolerance | None) -> Checked:
        """Compare at most ten pairs of answers, the primary's and the shadow's, in a worker.

        Within `tolerance`, or by the handler's `compare` where that is None. Raises NoWorker, Draining, WorkerDied.
        """

    def hand_over(self, other: PoolLike, tell: Callable[[Receiver], None]) -> int:
        """Give the requests that wait, and named no version, to another version's pool; returns how many.

        `tell` is called with the receiver of each.
        """

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """It serves nobody for now: `give_up` may be called where its memory is wanted. None: it serves again."""

    def refuse_accepted(self, error: MarserveError) -> Sequence[GivenUp]:
        """Refuse all that was accepted and is not answered yet, with `error`; what that was, the oldest first."""

    async def stop(self, drain_s: float = 0.0) -> None:
        """Answer what was accepted, for at most `drain_s`; then end the workers and free everything."""

    def workers(self) -> Sequence[WorkerLike]:
        """Every worker slot, in the order they were made."""


class EnvironmentLike(Protocol):
    """What a model requires, installed, and in use until `release`."""

    @property
    def folder(self) -> Path:
        """Where it is."""

    @property
    def kind(self) -> str:
        """`packages` or `venv`."""

    @property
    def packages(self) -> Path | None:
        """The folder that workers import from; None of a virtual environment."""

    @property
    def modules(self) -> Path:
        """The folder that its modules lie in."""

    @property
    def python(self) -> Path | None:
        """The interpreter that workers run in; None where it is the server's."""

    @property
    def may_share_imports(self) -> bool:
        """Whether workers may be forked from a process that has imported what is dear for many models."""

    @property
    def installed(self) -> Sequence[object]:
        """Its packages; as text, a line of a lock file each."""

    @property
    def log(self) -> Path:
        """What the installation said."""

    @property
    def seconds(self) -> float:
        """How long that took."""

    @property
    def was_there(self) -> bool:
        """Whether it was installed before."""

    def release(self) -> None:
        """Use it no more. May be called twice."""


class EnvironmentsLike(Protocol):
    """Where requirements are installed."""

    async def obtain(
        self, model: str, requirements: Requirements, kind: Literal["packages", "venv"] = "packages"
    ) -> EnvironmentLike:
        """Find or make the environment that holds these. Raises DependencyFailed; leaves nothing when cancelled."""


class MetricsBook(Protocol):
    """Where the numbers of a version are rendered from."""

    def register(self, version_metrics: VersionMetrics) -> None:
        """Render these from now on."""

    def remove(self, version_metrics: VersionMetrics) -> None:
        """Render them no more."""


PoolFactory = Callable[[PoolOptions, Load], PoolLike]
