"""A pool without processes: it loads as a test says, holds requests until told, and remembers what was done to it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from marserve.errors import Draining, LoadFailed, MarserveError, NoWorker, QueueFull
from marserve.messages import Answer, Checked, Load, Part, Receiver, Request
from marserve.option_values import Tolerance
from marserve.pool.dispatch.queue import GivenUp
from marserve.pool.options import PoolOptions
from marserve.pool.pool import DeathView, WorkerView
from marserve.telemetry.metrics.counts import VersionMetrics


def a_death(cause: str = "killed", detail: str = "killed by SIGKILL", **more: Any) -> DeathView:
    """The end of a worker."""
    return DeathView(cause, 1_700_000_000.0, detail, **more)


def a_worker(name: str, status: str = "READY", **more: Any) -> WorkerView:
    """One worker slot."""
    usual = {
        "started_at": 1_700_000_000.25,
        "pid": 4711,
        "gpu_id": None,
        "memory_bytes": 50_000_000,
        "restarts": 0,
        "load_s": 0.0,
        "how_started": "fresh",
        "last_death": None,
    }
    return WorkerView(id=name, status=status, **{**usual, **more})  # type: ignore[arg-type]


@dataclass
class FakeJob:
    """A request that the pool has."""

    pool: FakePool
    request: Request
    receiver: Receiver
    is_cancelled: bool = False
    keeps_the_only_worker: bool = False

    def cancel(self) -> None:
        """The client has gone."""
        self.is_cancelled = True
        if self in self.pool.held:
            self.pool.held.remove(self)
            self.pool.changed.set()

    def hold(self) -> None:
        """Nothing here streams faster than a test reads."""

    def resume(self) -> None:
        """As above."""

    def answer(self, answer: Answer) -> None:
        """End it."""
        self.cancel()
        self.receiver.on_answer(answer)

    def fail(self, error: MarserveError) -> None:
        """End it with an error."""
        self.cancel()
        self.receiver.on_error(error)


@dataclass
class Behaviour:
    """How pools of one model behave.

    `load`: `ok`, `fail`, `memory`, `missing` (a module), or `wait` for `FakePool.finish_load`. With `holds` requests
    wait for the test.
    `metadata` is the body that a describe request gets; None holds it too. `body` is what others get, None for
    `model version`; `fails` is what befalls them instead, `report` what a check of batches finds, `warnings` what
    the workers told of their start, and `warm_up_failure` the one of them about their warm-up. Workers that are to
    serve a build say that they compute on `computes_on`.
    """

    load: str = "ok"
    holds: bool = False
    metadata: bytes | None = b"null"
    never_stops: bool = False
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes | None = None
    fails: MarserveError | None = None
    report: Mapping[str, object] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    warm_up_failure: str = ""
    computes_on: str = ""


class FakePool:
    """Has every member of a pool that the registry uses. Workers are loaded as soon as they are asked for."""

    _ids = itertools.count(9000)

    def __init__(self, options: PoolOptions, load: Load, behaviour: Behaviour) -> None:
        self.options = options
        self.load = load
        self.behaviour = behaviour
        self.metrics = VersionMetrics(options.model, options.version)
        self.held: list[FakeJob] = []
        self.changed = asyncio.Event()
        self.scaled: list[tuple[int, int]] = []
        self.stops: list[float] = []
        self.is_started = False
        self.is_stopped = False
        self.is_healthy = True
        self.last_death: DeathView | None = None
        self.warnings: Sequence[str] = behaviour.warnings
        self.warm_up_failure = behaviour.warm_up_failure
        self.described: Mapping[str, object] = {}
        self.declaration: Mapping[str, object] | None = None
        self.held_bytes: int | None = None
        self.threads = 2
        self.checked: list[list[bytes]] = []
        self.compared = 0
        self.compare_error: MarserveError | None = None
        self.report: Mapping[str, object] = behaviour.report
        self._workers: list[WorkerView] = []
        self._minimum = options.min_workers
        self._load_ended = asyncio.Event()
        self.tell_state: Callable[[], None] = lambda: None
        self.give_up: Callable[[], None] | None = None

    @property
    def queued(self) -> int:
        """What it holds."""
        return len(self.held)

    @property
    def running(self) -> int:
        """Nothing: what is held is queued."""
        return 0

    @property
    def ready_workers(self) -> int:
        """Loaded workers."""
        return sum(worker.status == "READY" for worker in self._workers)

    @property
    def wanted_workers(self) -> int:
        """All workers."""
        return len(self._workers)

    def workers(self) -> list[WorkerView]:
        """The slots."""
        return list(self._workers)

    def follow(self, tell: Callable[[], None]) -> None:
        """What is told of its workers."""
        self.tell_state = tell

    def start(self) -> None:
        """Have the workers that the options ask for."""
        self.is_started = True
        self._have(self.options.min_workers)

    def scale(self, minimum: int, maximum: int) -> None:
        """Have between `minimum` and `maximum` workers."""
        self.scaled.append((minimum, maximum))
        self._minimum = minimum
        self._load_ended.clear()
        self._have(min(max(minimum, len(self._workers)), maximum))

    def _have(self, count: int) -> None:
        status = "READY" if self.behaviour.load == "ok" else "LOADING"
        del self._workers[count:]
        while len(self._workers) < count:
            on = self.behaviour.computes_on if self.load.build else ""
            self._workers.append(a_worker(str(next(self._ids)), status, computes_on=on))
        if self.behaviour.load != "wait":
            self._load_ended.set()
        self.tell_state()

    def finish_load(self, how: str = "ok") -> None:
        """End a load that waits, well (`ok`) or badly (`fail`, `memory`)."""
        self.behaviour.load = how
        count, self._workers = len(self._workers), []
        self._have(count)

    def reconfigure(self, *, batch_size: int | None = None, max_batch_delay_s: float | None = None) -> None:
        """Have other values."""
        self.options = dataclasses.replace(
            self.options,
            batch_size=self.options.batch_size if batch_size is None else batch_size,
            max_batch_delay_s=self.options.max_batch_delay_s if max_batch_delay_s is None else max_batch_delay_s,
        )

    async def compare(
        self, pairs: Sequence[tuple[Answer, Answer]], how: Tolerance | Literal["handler", "scores"]
    ) -> Checked:
        """Numbers may differ by the tolerance's absolute part; with none whatever holds `bad` cannot be compared."""
        self.compared += 1
        await asyncio.sleep(0)
        if self.compare_error is not None:
            raise self.compare_error
        told = []
        tolerance = how if isinstance(how, Tolerance) else None
        for index, (primary, shadow) in enumerate(pairs):
            if tolerance is None and b"bad" in shadow.body:
                told.append(("failed", index, "", "compare failed: ValueError('bad')", ""))
            elif primary.body != shadow.body and (
                tolerance is None or abs(float(primary.body) - float(shadow.body)) > tolerance.absolute
            ):
                told.append(("answers", index, "y", shadow.body.decode(), primary.body.decode()))
        error, magnitude = (0.5, 10.0) if how == "scores" else (0.0, 0.0)
        return Checked(
            1, 0.0, len(pairs), [1], len(pairs), len(pairs), len(told), told, [], error=error, magnitude=magnitude
        )

    def hand_over(self, other: object, tell: Callable[[Receiver], None]) -> int:
        """Whatever it holds and nobody named the version for."""
        assert isinstance(other, FakePool)
        moving = [job for job in self.held if not job.request.names_version]
        for job in moving:
            tell(job.receiver)
            self.held.remove(job)
            other.held.append(job)
            job.pool = other
        return len(moving)

    async def check(self, samples: Sequence[list[Part]] = ()) -> dict[str, object]:
        """Remember the samples and give the report that the test put there."""
        self.checked.append([bytes(part.body) for parts in samples for part in parts])
        return dict(self.report)

    async def wait_until_ready(self) -> bool:
        """As the pool: True, or LoadFailed; False when it was stopped meanwhile."""
        await self._load_ended.wait()
        if self.is_stopped:
            return False
        if self._minimum and self.behaviour.load in ("fail", "memory", "missing"):
            raise LoadFailed(
                self.options.model,
                self.options.version,
                out_of_memory=self.behaviour.load == "memory",
                reason="the handler raised",
                cause="missing_module" if self.behaviour.load == "missing" else "",
            )
        return True

    def submit(self, request: Request, receiver: Receiver) -> FakeJob:
        """Answer at once with `model version`, or hold the request."""
        if self.is_stopped:
            raise Draining
        if not self._workers:
            raise NoWorker(self.options.model)
        if len(self.held) >= self.options.queue_size:
            raise QueueFull(self.options.model, retry_after_s=2.0)
        self.metrics.requests += 1
        job = FakeJob(self, request, receiver)
        if request.names_version:
            self.metrics.named_requests += 1
        if request.is_inner:
            self.metrics.inner_requests += 1
        body = self.behaviour.body if self.behaviour.body is not None else b"%s %s" % self._names()
        body = self.behaviour.metadata if request.is_describe else body
        if self.behaviour.fails is not None:
            receiver.on_error(self.behaviour.fails)
            return job
        if body is None or (self.behaviour.holds and not request.is_describe):
            self.held.append(job)
        else:
            receiver.on_answer(Answer(body, headers=self.behaviour.headers))
        return job

    def _names(self) -> tuple[bytes, bytes]:
        return self.options.model.encode(), self.options.version.encode()

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """Remember whom to call where its memory is wanted."""
        self.give_up = give_up

    def refuse_accepted(self, error: MarserveError) -> list[GivenUp]:
        """Fail what is held."""
        held = list(self.held)
        for job in held:
            job.fail(error)
        return [GivenUp(job.request.id, "waiting", 0.0) for job in held]

    async def wait_until_idle(self) -> None:
        """Wait until the last of what it holds has ended."""
        while self.held:
            self.changed.clear()
            await self.changed.wait()

    async def stop(self, drain_s: float = 0.0) -> None:
        """Wait for what is held, at most `drain_s`, then be gone."""
        self.stops.append(drain_s)
        if self.behaviour.never_stops:
            await asyncio.Event().wait()
        end = asyncio.get_running_loop().time() + drain_s
        while self.held and asyncio.get_running_loop().time() < end and len(self.stops) == 1:
            await asyncio.sleep(0.001)
        for job in list(self.held):
            job.fail(Draining())
        self.is_stopped = True
        self._workers.clear()
        self._load_ended.set()


class FakePools:
    """A pool factory that keeps what it made, oldest first, and how each model's pools behave."""

    def __init__(self) -> None:
        self.made: list[FakePool] = []
        self.behaviours: dict[str, Behaviour] = {}

    def __call__(self, options: PoolOptions, load: Load) -> FakePool:
        """Make a pool."""
        pool = FakePool(options, load, self.behaviours.setdefault(options.model, Behaviour()))
        self.made.append(pool)
        return pool

    def of(self, model: str, version: str = "1.0") -> FakePool:
        """The newest pool of a version."""
        return next(
            pool for pool in reversed(self.made) if (pool.options.model, pool.options.version) == (model, version)
        )


class FakeMetrics:
    """Remembers which versions are rendered."""

    def __init__(self) -> None:
        self.shown: list[VersionMetrics] = []

    def register(self, version_metrics: VersionMetrics) -> None:
        """Render these from now on."""
        self.shown.append(version_metrics)

    def remove(self, version_metrics: VersionMetrics) -> None:
        """Render them no more."""
        self.shown.remove(version_metrics)
