"""Every registered model: its versions, which one is the default, and what may be done to them.

Names and versions change only between two awaits, so no request and no other call ever sees half a change. A version
that goes is taken off the list first and then drained: what it had accepted is answered, what comes later is not found.

It knows no HTTP; it gives and raises plain data and typed errors. Processes belong to the pools, files to the intake.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from marserve.errors import (
    ArchiveExists,
    BadInput,
    CleanUpTimedOut,
    DefaultVersionInUse,
    DependencyFailed,
    Draining,
    LoadFailed,
    MarserveError,
    ModelNotFound,
    NoWorker,
    VersionConflict,
    VersionNotFound,
)
from marserve.messages import Answer, Part, Receiver, Request
from marserve.registry.calls import (
    LARGEST_BATCH,
    LONGEST_BATCH_DELAY_S,
    MOST_WORKERS,
    ModelPage,
    Registered,
    RegisterParameters,
    RegistryOptions,
    Scaled,
)
from marserve.registry.customized import ask_for_metadata, read_metadata
from marserve.registry.describe import describe_version, page_of
from marserve.registry.installing import Installations
from marserve.registry.intake import Intake, Unpacked
from marserve.registry.plan import Plan, check_parameters, make_plan
from marserve.registry.ports import EnvironmentsLike, JobLike, MetricsBook, PoolFactory, PoolLike
from marserve.registry.readiness import Readiness, Standing, judge
from marserve.registry.snapshot import SnapshotVersion, archive_name
from marserve.registry.startup import models_to_load
from marserve.registry.traffic import choose_version
from marserve.settings.values import LoadModels
from marserve.store.fetch_guard import hide_query

log = logging.getLogger("marserve.registry")

PARALLEL_INTAKES = 2
# Downloads wait for the network, which is no reason for archives that lie here to wait.
PARALLEL_FETCHES = 4
# How often a drain looks whether something still runs; pools do not tell when they fall silent.
DRAIN_LOOK_S = 0.02
# What ending workers may take beyond the time that they are given to drain: SIGTERM, SIGKILL, reaping.
KILL_GRACE_S = 15.0
STOP_LIMIT_S = 60.0
# Remarks on calls that a version keeps for describe.
MOST_REMARKS = 20

Result = TypeVar("Result")


class _Version:
    """One registered version and what belongs to it: its pool, and on disk what its plan holds.

    `is_settled`: its first load has ended, well or badly.
    """

    __slots__ = ("facts", "is_settled", "max_workers", "min_workers", "plan", "pool", "remarks")

    def __init__(self, plan: Plan, pool: PoolLike) -> None:
        self.facts = plan.facts
        self.remarks: list[str] = []
        self.plan = plan
        self.pool = pool
        self.min_workers = plan.facts.options.min_workers
        self.max_workers = plan.facts.options.max_workers
        self.is_settled = not self.min_workers

    @property
    def model(self) -> str:
        return self.facts.options.model

    @property
    def name(self) -> str:
        return self.facts.options.version


class _Model:
    """The versions of one name, oldest first; `default` is always one of them."""

    __slots__ = ("default", "versions")

    def __init__(self, version: _Version) -> None:
        self.versions = {version.name: version}
        self.default = version.name


class Registry:
    """All models of a server. Every method is called on the event loop.

    What changes something runs to its end even when the caller is cancelled: a client that hangs up in the middle of
    a registration leaves nothing half done.
    """

    def __init__(
        self,
        options: RegistryOptions,
        intake: Intake,
        make_pool: PoolFactory,
        metrics: MetricsBook,
        environments: EnvironmentsLike | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`environments` is where requirements are installed; they are where `options` say so.

        `on_change` is called after a change of what `snapshot` tells that somebody asked for.
        """
        self._options = options
        self._intake = intake
        self._make_pool = make_pool
        self._metrics = metrics
        self._environments = environments
        self._on_change = on_change
        self._unrestored: dict[tuple[str, str], SnapshotVersion] = {}
        self._installations = Installations()
        self._models: dict[str, _Model] = {}
        self._leaving: set[_Version] = set()
        self._changes: set[asyncio.Task[Any]] = set()
        self._intakes = asyncio.Semaphore(PARALLEL_INTAKES)
        self._fetches = asyncio.Semaphore(PARALLEL_FETCHES)
        self._is_leaving = False
        self._is_draining = False
        self._has_tried_startup = False
        self._startup_failures: list[str] = []
        self._startup_models: list[str] = []

    # ------------------------------------------------------------------------------------------- requests

    def submit(self, model: str, version: str | None, request: Request, receiver: Receiver) -> JobLike:
        """Hand a request to the version it names, or to the default one.

        Raises Draining, ModelNotFound, VersionNotFound, and what the pool raises: NoWorker, QueueFull, NoTicket,
        FingerprintRefused.
        """
        if self._is_draining and not request.is_inner:
            raise Draining
        entry = self._models.get(model)
        if entry is None:
            raise ModelNotFound(model)
        pool = choose_version(model, entry.versions, entry.default, version).pool
        try:
            return pool.submit(request, receiver)
        except NoWorker as error:
            if version is None:
                raise
            # The contract's text names the version where the client did; the pool cannot know that.
            raise type(error)(model, version, retry_after_s=error.retry_after_s) from None

    @property
    def only_startup_model(self) -> str | None:
        """The model that was loaded at start, if it is exactly one: `/invocations` may leave its name out."""
        return self._startup_models[0] if len(self._startup_models) == 1 else None

    def check_exists(self, model: str, version: str | None = None) -> None:
        """Return if the version is registered (any, where none is named).

        Raises ModelNotFound or VersionNotFound.
        """
        self._find(model, version)

    # ------------------------------------------------------------------------------------------- register

    async def register(self, parameters: RegisterParameters) -> Registered:
        """Take an archive in and make it a version; the first version of a name is its default.

        Raises BadInput, ArchiveNotFound, BadArchive, VersionConflict, Draining, and LoadFailed when it was to wait for
        workers and one could not load the model. After any error nothing of the registration is left.
        """
        return await self._carry_through(self._register(parameters))

    async def register_unpacked(self, parameters: RegisterParameters, unpacked: Unpacked) -> Registered:
        """As `register`, of what the caller has unpacked; a folder that is not private stays the caller's."""
        return await self._carry_through(self._register(parameters, unpacked))

    async def _register(self, parameters: RegisterParameters, unpacked: Unpacked | None = None) -> Registered:
        check_parameters(parameters)
        if unpacked is None:
            unpacked = await self._take_in(parameters.url)
        version = await self._admit(parameters, unpacked)
        workers = version.min_workers
        if not workers:
            self._note_change(version)
            return Registered(version.model, version.name, 0, "done")
        if not parameters.synchronous:
            self._follow(self._settle(version))
            self._note_change(version)
            return Registered(version.model, version.name, workers, "begun")
        try:
            is_ready = await self._wait_until_ready(version)
        except LoadFailed as error:
            log.error("Model %s version %s failed to load: %s", version.model, version.name, error.reason or error)
            if self._is_listed(version):
                self._remove(version)
                await self._retire(version, drain_s=0.0)
            raise
        self._note_change(version)
        return Registered(version.model, version.name, workers, "done" if is_ready else "partial")

    async def _take_in(self, url: str, *, is_at_startup: bool = False) -> Unpacked:
        async with self._fetches:
            if self._is_draining:
                raise Draining
            try:
                fetched = await asyncio.to_thread(self._intake.fetch, url)
            except ArchiveExists as error:
                if not is_at_startup:
                    raise
                # An earlier start of this server fetched it; that must not keep a later one from having it.
                log.info("%s is not fetched again: %s is in the store", hide_query(url), error.name)
                url, fetched = error.name, None
        async with self._intakes:
            if self._is_draining:
                raise Draining
            return await asyncio.to_thread(self._intake.take_in, url, fetched)

    async def _admit(
        self, parameters: RegisterParameters, unpacked: Unpacked, *, is_at_startup: bool = False
    ) -> _Version:
        """Make the unpacked archive a version, or delete it and raise."""
        return await self._establish(parameters, await self._plan(parameters, unpacked, is_at_startup=is_at_startup))

    async def _plan(self, parameters: RegisterParameters, unpacked: Unpacked, *, is_at_startup: bool) -> Plan:
        """Plan a version of the unpacked archive, or delete it and raise."""
        try:
            return await asyncio.to_thread(make_plan, parameters, unpacked, self._options, is_at_startup=is_at_startup)
        except BaseException:
            await asyncio.to_thread(unpacked.discard)
            raise

    async def _establish(self, parameters: RegisterParameters, plan: Plan) -> _Version:
        """Install what the plan wants and put the version on the list, or delete what belongs to the plan and raise."""
        model, name = plan.facts.options.model, plan.facts.options.version
        with contextlib.ExitStack() as stack:
            try:
                if plan.wanted is not None and self._environments is not None:
                    if self._is_draining:
                        raise Draining
                    self._refuse_conflict(model, name)
                    claim = stack.enter_context(self._installations.claim(model, name))
                    is_synchronous = parameters.synchronous
                    plan = await claim.install(plan, self._environments, is_synchronous=is_synchronous)
                return self._publish(plan)
            except BaseException as error:
                await asyncio.to_thread(plan.discard)
                if isinstance(error, DependencyFailed):
                    if self._is_draining:
                        raise Draining from error
                    self._remark_failure(model, name, error)
                raise

    def _remark_failure(self, model: str, name: str, error: DependencyFailed) -> None:
        """Let the versions of the model that are there say in describe why another one is not."""
        if model in self._models:
            words = "; ".join(error.reason.splitlines()[-3:])
            self.remark(
                model, None, [f"version {name} was not registered, its requirements were not installed: {words}"]
            )

    def _refuse_conflict(self, model: str, name: str) -> None:
        """Raise VersionConflict where the version is registered."""
        entry = self._models.get(model)
        if entry is not None and name in entry.versions:
            raise VersionConflict(model, name)

    def _publish(self, plan: Plan) -> _Version:
        """Put a version on the list and begin to start its workers. Nothing is awaited between check and deed."""
        if self._is_draining:
            raise Draining
        model, name = plan.facts.options.model, plan.facts.options.version
        self._refuse_conflict(model, name)
        entry = self._models.get(model)
        pool = self._make_pool(plan.facts.options, plan.load)
        version = _Version(plan, pool)
        pool.start()
        self._metrics.register(pool.metrics)
        if entry is None:
            self._models[model] = _Model(version)
        else:
            entry.versions[name] = version
        for warning in plan.facts.warnings:
            log.warning("Model %s version %s: %s", model, name, warning)
        return version

    # ------------------------------------------------------------------------------------------- start-up

    async def load_at_start(self, load_models: LoadModels) -> None:
        """Load what the setting `load_models` names. Returns when all were tried.

        Workers are begun, not waited for. A model that cannot be loaded is logged and left out.
        """
        await self._carry_through(self._load_at_start(load_models))

    async def _load_at_start(self, load_models: LoadModels) -> None:
        if load_models:
            names = await asyncio.to_thread(self._intake.store.names)
            await self._load_all_at_start(
                [
                    RegisterParameters(url=model.url, model_name=model.name, synchronous=False)
                    for model in models_to_load(load_models, names)
                ]
            )
        self._has_tried_startup = True

    async def restore(self, versions: Sequence[SnapshotVersion]) -> None:
        """Load what a snapshot has, in place of `load_at_start`. Returns when all were tried.

        What cannot be loaded is logged and left out; it stays in the snapshots that follow, so that a restart with the
        archive mended has it back.
        """
        await self._carry_through(self._restore(versions))

    async def _restore(self, versions: Sequence[SnapshotVersion]) -> None:
        await self._load_all_at_start(
            [
                RegisterParameters(
                    url=version.archive,
                    model_name=version.model,
                    handler=version.handler,
                    synchronous=False,
                    restored=version,
                )
                for version in versions
            ]
        )
        self._has_tried_startup = True

    async def _load_all_at_start(self, models: Sequence[RegisterParameters]) -> None:
        # Read side by side, published in the order of the setting: it decides which version is the default.
        takes = [(model, asyncio.create_task(self._take_in(model.url, is_at_startup=True))) for model in models]
        # What is installed for one of them must not keep the others waiting, but for those of the same name.
        latest: dict[str, asyncio.Task[None]] = {}
        for model, take in takes:
            await self._load_one_at_start(model, take, latest)
        if latest:
            await asyncio.wait(latest.values())

    async def _load_one_at_start(
        self, parameters: RegisterParameters, take: asyncio.Task[Unpacked], latest: dict[str, asyncio.Task[None]]
    ) -> None:
        """Load one archive; returns when it is loaded, or when only its requirements are waited for.

        `latest` are the models that wait for some, by name: the next version of such a name waits for it in turn.
        """
        try:
            plan = await self._plan(parameters, await take, is_at_startup=parameters.restored is None)
        except Exception as error:
            self._note_startup_failure(parameters, error)
            return
        before = latest.get(plan.facts.options.model)
        if plan.wanted is None and before is None:
            await self._establish_at_start(parameters, plan)
        else:
            work = self._establish_at_start(parameters, plan, before)
            latest[plan.facts.options.model] = self._follow(work)

    async def _establish_at_start(
        self, parameters: RegisterParameters, plan: Plan, before: asyncio.Task[None] | None = None
    ) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            version = await self._establish(parameters, plan)
        except Exception as error:
            self._note_startup_failure(parameters, error)
            return
        if parameters.restored is not None and parameters.restored.is_default:
            self._models[version.model].default = version.name
        if version.model not in self._startup_models:
            self._startup_models.append(version.model)
        if not version.is_settled:
            self._follow(self._settle(version))

    def _note_startup_failure(self, parameters: RegisterParameters, error: Exception) -> None:
        restored = parameters.restored
        if restored is not None:
            self._unrestored[restored.model, restored.version] = restored
        # A border: whatever is wrong with one archive must not keep the server from starting with the others.
        is_known = isinstance(error, MarserveError)
        sentence = str(error) if is_known else "an unexpected error; the log says more"
        log.error(
            "Failed to load model: %s (%s)", hide_query(parameters.url), sentence, exc_info=None if is_known else error
        )
        self._startup_failures.append(f"{hide_query(parameters.url)} was not loaded: {sentence}")

    # ------------------------------------------------------------------------------------------- scale

    async def scale(
        self, model: str, version: str | None, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Scaled:
        """Have between `min_workers` and `max_workers` workers of a version; dead ones start again.

        0 as the least number ends them all. Raises BadInput, ModelNotFound, VersionNotFound, Draining, and LoadFailed
        when it was to wait and a worker could not load the model; the version stays registered then.
        """
        if min_workers < 0 or max_workers > MOST_WORKERS:
            raise BadInput(f"min_worker and max_worker must be between 0 and {MOST_WORKERS}.")
        if max_workers < min_workers:
            raise BadInput("max_worker cannot be less than min_worker.")
        if self._is_draining:
            raise Draining
        chosen = self._find(model, version)
        most = chosen.facts.options.most_workers
        if most:  # as many as there are devices for (contract 10.5)
            min_workers, max_workers = min(min_workers, most), min(max_workers, most)
        chosen.min_workers, chosen.max_workers = min_workers, max_workers
        may_sleep = chosen.facts.options.idle_timeout_s is not None
        chosen.pool.scale(min_workers, max_workers if min_workers or may_sleep else 0)
        self._note_change(chosen)
        if not synchronous:
            self._follow(self._settle(chosen))
            return Scaled(model, version, min_workers, "begun")
        try:
            is_ready = await self._carry_through(self._wait_until_ready(chosen))
        except LoadFailed as error:
            log.error("Model %s version %s failed to load: %s", model, chosen.name, error.reason or error)
            raise LoadFailed(
                model, version, out_of_memory=error.out_of_memory, reason=error.reason, cause=error.cause or ""
            ) from error
        return Scaled(model, version, min_workers, "done" if is_ready else "partial")

    def remark(self, model: str, version: str | None, sentences: Iterable[str]) -> None:
        """Note what was odd about a call for a version: in the log, and among describe's warnings. Each once.

        Raises ModelNotFound, VersionNotFound.
        """
        chosen = self._find(model, version)
        for sentence in sentences:
            if sentence not in chosen.remarks and len(chosen.remarks) < MOST_REMARKS:
                chosen.remarks.append(sentence)
                log.warning("Model %s version %s: %s", model, chosen.name, sentence)

    def tune(self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None) -> str:
        """Change how batches are formed, at once and without a restart. Returns a sentence with the values in force.

        Raises BadInput, ModelNotFound, VersionNotFound, Draining.
        """
        if batch_size is not None and not 1 <= batch_size <= LARGEST_BATCH:
            raise BadInput(f"batch_size is {batch_size}; it must be from 1 to {LARGEST_BATCH}.")
        if max_batch_delay_s is not None and not 0 <= max_batch_delay_s <= LONGEST_BATCH_DELAY_S:
            raise BadInput(
                f"max_batch_delay is {max_batch_delay_s * 1000:g} ms; it must be from 0 to "
                f"{LONGEST_BATCH_DELAY_S * 1000:g}."
            )
        if self._is_draining:
            raise Draining
        chosen = self._find(model, version)
        chosen.pool.reconfigure(batch_size=batch_size, max_batch_delay_s=max_batch_delay_s)
        self._note_change(chosen)
        options = chosen.pool.options
        log.info(
            "Model %s version %s: batch size %d, batch delay %g s",
            model,
            chosen.name,
            options.batch_size,
            options.max_batch_delay_s,
        )
        return (
            f'Model "{model}" Version: {chosen.name} forms batches of up to {options.batch_size}, '
            f"delay {options.max_batch_delay_s * 1000:g} ms"
        )

    async def check(self, model: str, version: str | None, samples: Sequence[list[Part]]) -> dict[str, Any]:
        """Compare batches of these inputs, or of the model's own samples, with single requests.

        Raises ModelNotFound, VersionNotFound, and what `PoolLike.check` raises.
        """
        chosen = self._find(model, version)
        report = await chosen.pool.check(samples)
        return {"modelName": chosen.model, "modelVersion": chosen.name, **report}

    # ------------------------------------------------------------------------------------------- describe, list

    def describe(self, model: str, version: str | None = None) -> dict[str, Any]:
        """What a version says of itself. Raises ModelNotFound or VersionNotFound."""
        return self._describe(self._find(model, version))

    def is_autoscaled(self, model: str, version: str | None = None) -> bool:
        """Whether the number of a version's workers follows the need. Raises ModelNotFound or VersionNotFound."""
        return self._find(model, version).facts.options.autoscale

    def describe_all(self, model: str) -> list[dict[str, Any]]:
        """What each version of a model says of itself, oldest first. Raises ModelNotFound."""
        return [self._describe(version) for version in self._entry(model).versions.values()]

    async def describe_customized(
        self, model: str, version: str | None = None, within_s: float | None = None
    ) -> tuple[dict[str, Any], Answer]:
        """As `describe`, with what the handler says in `customizedMetadata`; and the handler's whole answer.

        `within_s` is the client's deadline, in seconds from now. Raises ModelNotFound, VersionNotFound,
        NoDescribeWorker, HandlerFailed and what else befalls a request.
        """
        chosen = self._find(model, version)
        answer = await ask_for_metadata(chosen.pool, model, chosen.facts.options.response_timeout_s, within_s)
        described = self._describe(chosen)
        metadata = read_metadata(answer.body)
        if metadata is not None:
            described["customizedMetadata"] = metadata
        return described, answer

    def _describe(self, version: _Version) -> dict[str, Any]:
        entry = self._models.get(version.model)
        return describe_version(
            version.facts,
            version.pool,
            min_workers=version.min_workers,
            max_workers=version.max_workers,
            is_default=entry is not None and entry.default == version.name,
            remarks=version.remarks,
        )

    def list_models(self, limit: int | None = None, offset: int | None = None) -> ModelPage:
        """One page of the models in order of their names."""
        defaults = ((name, entry.versions[entry.default].facts) for name, entry in self._models.items())
        names = [(name, hide_query(facts.url)) for name, facts in defaults if not facts.is_function]
        return ModelPage(*page_of(names, limit=limit, offset=offset))

    # ------------------------------------------------------------------------------------------- unregister, default

    async def unregister(self, model: str, version: str | None = None) -> None:
        """Take a version off the list, answer what it had accepted, end its workers, delete its folder.

        Raises ModelNotFound, VersionNotFound, DefaultVersionInUse, and CleanUpTimedOut when ending its workers takes
        too long; that then goes on behind the caller's back. One whose requirements are being installed is given up.
        """
        for key in [key for key in self._unrestored if key[0] == model and version in (None, key[1])]:
            del self._unrestored[key]
            self._on_change()
        being_installed = self._installations.find(model, version)
        if being_installed and (model not in self._models or version is not None):
            for claim in being_installed:
                claim.give_up()
            await asyncio.gather(*(claim.wait_until_ended() for claim in being_installed))
            return
        entry = self._entry(model)
        chosen = self._find(model, version)
        if chosen.name == entry.default and len(entry.versions) > 1:
            raise DefaultVersionInUse(model)
        self._remove(chosen)
        self._note_change(chosen)
        await self._carry_through(self._retire(chosen, drain_s=self._options.unregister_timeout_s))

    def set_default(self, model: str, version: str) -> None:
        """Let `version` answer requests that name none, from now on. Raises ModelNotFound or VersionNotFound."""
        entry = self._entry(model)
        if version not in entry.versions:
            raise VersionNotFound(model, version, f"Model version {version} does not exist for model {model}")
        entry.default = version
        self._note_change(entry.versions[version])

    # ------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> list[SnapshotVersion]:
        """Every version as a later start would have it back. Nodes of workflows are left out."""
        listed = [self._as_snapshot(version) for version in self._all() if version.facts.workflow is None]
        names = {(version.model, version.version) for version in listed}
        return [*listed, *(version for key, version in self._unrestored.items() if key not in names)]

    def _as_snapshot(self, version: _Version) -> SnapshotVersion:
        facts, own = version.facts, version.plan.unpacked.manifest.handler or self._options.default_handler
        handler = version.plan.load.handler
        return SnapshotVersion(
            model=version.model,
            version=version.name,
            archive=archive_name(facts.url),
            is_default=self._models[version.model].default == version.name,
            min_workers=version.min_workers,
            max_workers=version.max_workers,
            batch_size=version.pool.options.batch_size,
            max_batch_delay_s=version.pool.options.max_batch_delay_s,
            response_timeout_s=facts.options.response_timeout_s,
            startup_timeout_s=facts.options.startup_timeout_s,
            runtime=facts.runtime,
            parallel_level=facts.options.parallel_level or facts.config.parallel_level,
            handler=handler if handler != own else None,
        )

    def _note_change(self, version: _Version) -> None:
        if version.facts.workflow is None:
            self._on_change()

    # ------------------------------------------------------------------------------------------- health

    def is_healthy(self) -> bool:
        """The contract's rule for `/ping`: no default version has given up more workers than it can spare."""
        return all(version.pool.is_healthy for version in self._defaults())

    def is_model_ready(self, model: str, version: str | None = None) -> bool:
        """Whether the version (the default one) has as many workers loaded as it should have, and at least one.

        One that sleeps until it is asked is ready to be asked. Raises ModelNotFound or VersionNotFound.
        """
        chosen = self._find(model, version)
        may_sleep = chosen.facts.options.idle_timeout_s is not None and not chosen.min_workers
        if may_sleep and chosen.max_workers and not chosen.pool.workers():
            return True
        return chosen.pool.ready_workers >= max(1, chosen.min_workers)

    def has_loaded_model(self) -> bool:
        """Whether a worker of any model's default version has loaded it."""
        return any(version.pool.ready_workers for version in self._defaults())

    def readiness(self) -> Readiness:
        """Whether to send requests here, and why not."""
        standings = [
            Standing(
                version.model,
                version.name,
                version.min_workers,
                version.pool.ready_workers,
                version.facts.is_at_startup or version.facts.is_restored,
                version.is_settled,
                version.facts.options.readiness_rule,
                version.pool.wanted_workers,
            )
            for version in self._defaults()
        ]
        return judge(
            standings,
            is_draining=self._is_leaving,
            has_tried_startup=self._has_tried_startup,
            startup_failures=self._startup_failures,
        )

    # ------------------------------------------------------------------------------------------- the end

    def begin_drain(self) -> None:
        """Say that the server is leaving: readiness falls from now on, requests are still taken."""
        self._is_leaving = True

    def refuse_new(self) -> None:
        """Take no more requests and registrations from now on; what was accepted goes on."""
        self._is_leaving = self._is_draining = True
        self._intake.stop_fetching()
        self._installations.give_up_all()

    async def drain(self, deadline_s: float) -> int:
        """Wait until nothing is queued or running, for at most `deadline_s`; returns how many requests are left."""
        loop = asyncio.get_running_loop()
        end = loop.time() + deadline_s
        while (outstanding := self._outstanding()) and loop.time() < end:
            await asyncio.sleep(min(DRAIN_LOOK_S, max(0.0, end - loop.time())))
        return outstanding

    def _outstanding(self) -> int:
        pools = [version.pool for version in (*self._all(), *self._leaving)]
        return sum(pool.queued + pool.running for pool in pools)

    async def stop(self) -> None:
        """End every version and delete every folder. Order: nothing new, all pools, changes under way, the folder."""
        self.refuse_new()
        for version in list(self._all()):
            self._remove(version)
        for version in self._leaving:
            # Those that are leaving already are hurried along.
            self._follow(self._end(version, drain_s=0.0))
        loop = asyncio.get_running_loop()
        end = loop.time() + STOP_LIMIT_S
        while self._changes and loop.time() < end:
            await asyncio.wait(self._changes, timeout=end - loop.time())
        for change in self._changes:
            log.error("A change of the models did not end in %s s and is given up: %s", STOP_LIMIT_S, change)
            change.cancel()
        await asyncio.to_thread(self._intake.clear)

    # ------------------------------------------------------------------------------------------- inside

    def _entry(self, model: str) -> _Model:
        entry = self._models.get(model)
        if entry is None:
            raise ModelNotFound(model)
        return entry

    def _find(self, model: str, version: str | None) -> _Version:
        entry = self._entry(model)
        return choose_version(model, entry.versions, entry.default, version)

    def _all(self) -> Iterator[_Version]:
        return (version for entry in self._models.values() for version in entry.versions.values())

    def _defaults(self) -> Iterator[_Version]:
        return (entry.versions[entry.default] for entry in self._models.values())

    def _is_listed(self, version: _Version) -> bool:
        entry = self._models.get(version.model)
        return entry is not None and entry.versions.get(version.name) is version

    def _remove(self, version: _Version) -> None:
        """Take a listed version off the list; if it was the default, the oldest that is left becomes it."""
        entry = self._models[version.model]
        del entry.versions[version.name]
        if not entry.versions:
            del self._models[version.model]
        elif entry.default == version.name:
            entry.default = next(iter(entry.versions))
        self._metrics.remove(version.pool.metrics)
        self._leaving.add(version)

    async def _retire(self, version: _Version, *, drain_s: float) -> None:
        """End a removed version. Raises CleanUpTimedOut when that takes too long; it goes on by itself then."""
        ending = self._follow(self._end(version, drain_s=drain_s))
        done, _ = await asyncio.wait({ending}, timeout=drain_s + KILL_GRACE_S)
        if not done:
            raise CleanUpTimedOut(version.model)
        ending.result()

    async def _end(self, version: _Version, *, drain_s: float) -> None:
        try:
            await version.pool.stop(drain_s)
        finally:
            self._leaving.discard(version)
            await asyncio.to_thread(version.plan.discard)

    async def _wait_until_ready(self, version: _Version) -> bool:
        try:
            return await version.pool.wait_until_ready()
        except LoadFailed as error:
            told = version.facts.requirements or {}
            if error.cause != "missing_module" or told.get("status") != "not installed":
                raise
            remedy = "what the archive requires is not installed, for install_py_dep_per_model is false"
            reason = f"{error.reason} ({remedy})"
            raise LoadFailed(error.model, error.version, reason=reason, cause=error.cause) from error
        finally:
            version.is_settled = True

    async def _settle(self, version: _Version) -> None:
        """Wait for a load that nobody else waits for, and log how it failed."""
        try:
            await self._wait_until_ready(version)
        except LoadFailed as error:
            log.error("Model %s version %s failed to load: %s", version.model, version.name, error.reason or error)

    def _follow(self, change: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run a change as a task of the registry's own; `stop` waits for it, and a failure is logged here."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, MarserveError):
            log.error("A change of the models failed", exc_info=error)

    async def _carry_through(self, change: Coroutine[Any, Any, Result]) -> Result:
        """Await a change that goes on even when the caller is cancelled."""
        return await asyncio.shield(self._follow(change))
