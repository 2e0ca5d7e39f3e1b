"""Every registered model: the calls that manage them, on the event loop. Requests go to `data_plane.py`.

The table of models and versions is `catalogue/versions.py`. `changes/registering.py` adds and removes versions,
`changes/load_at_start.py` loads the models of the start. A version that leaves is taken off the list first and then
drained: requests that it had accepted are answered, later ones get 404.

The registry knows no HTTP; it returns plain data and raises typed errors. Processes belong to the pools, files to the
intake.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import to_builtins

from marserve.answers.management import VersionActivity
from marserve.answers.pages import OfferedModel, OfferedName, OfferedNames, OfferedVersion
from marserve.environments.environments import Environments
from marserve.errors import CopyRefused, Draining, LoadFailed, ModelNotFound, NodeInUse, VersionNotFound
from marserve.messages import Answer, Part, Request
from marserve.model_options import IN_FORCE, Said, said_of
from marserve.pool.changes import Changes as StateChanges
from marserve.pool.checks.profiles import ProfileWish, TakenProfile
from marserve.registry.catalogue.activity import activity_of
from marserve.registry.catalogue.describe import declared_by, describe_version, page_of, state_of, takes_elements
from marserve.registry.catalogue.expected_input import expected_input
from marserve.registry.catalogue.metadata_of_handler import ask_for_metadata, read_metadata
from marserve.registry.catalogue.mirrors import Mirrors
from marserve.registry.catalogue.plan import Unpacked
from marserve.registry.catalogue.protocol_tensors import protocol_tensors, reads_tensors
from marserve.registry.catalogue.readiness import Readiness, Standing, judge
from marserve.registry.catalogue.snapshot import SnapshotVersion, archive_name
from marserve.registry.catalogue.traffic_control import TrafficControl
from marserve.registry.catalogue.versions import PoolFactory, Version, Versions
from marserve.registry.changes.actual import ActualModel, ActualState, ActualVersion
from marserve.registry.changes.copying import copy_parameters
from marserve.registry.changes.dry_run import Rehearsal
from marserve.registry.changes.hooks import Hooks
from marserve.registry.changes.kept_versions import Keeping
from marserve.registry.changes.load_at_start import Starting
from marserve.registry.changes.read_actual import look_at
from marserve.registry.changes.rebuilding import Rebuilding
from marserve.registry.changes.registering import Registering, remark
from marserve.registry.changes.swap import SwapParameters, Swapped, Swapping
from marserve.registry.changes.transaction import Transaction
from marserve.registry.changes.under_way import Changes
from marserve.registry.data_plane import DataPlane
from marserve.registry.intake.intake import Intake
from marserve.registry.intake.registration import (
    CopyParameters,
    ModelPage,
    Registered,
    RegisterParameters,
    RegistryOptions,
    Scaled,
    check_batching,
    check_workers,
)
from marserve.registry.intake.uploads import Uploads
from marserve.settings.values import LoadModels
from marserve.store.addresses.fetch_guard import hide_query
from marserve.telemetry.body_samples import BodySamples
from marserve.telemetry.kept_requests import KeptRequests, Replayed
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.histogram import SECONDS_BOUNDS, Histogram
from marserve.telemetry.metrics.server_metrics import Metrics

log = logging.getLogger("marserve.registry")

# The event loop takes some 10 µs for the sample of a version that is asked.
_SAMPLED_AT_ONCE = 100

STOP_LIMIT_S = 60.0


class Registry:
    """All models of a server. Every method is called on the event loop.

    A change runs to its end even when the caller is cancelled: a client that hangs up in the middle of a registration
    leaves nothing half done.
    """

    def __init__(
        self,
        options: RegistryOptions,
        intake: Intake,
        make_pool: PoolFactory,
        metrics: Metrics,
        environments: Environments | None = None,
        on_change: Callable[[], None] = lambda: None,
        hooks: Hooks | None = None,
        samples: BodySamples | None = None,
        keeper: KeptRequests | None = None,
    ) -> None:
        """`environments` holds installed requirements; they are installed if `options` say so.

        `on_change` is called after each requested change of what `snapshot` returns. Hooks may be added to `hooks`
        until the server starts.
        """
        self._options = options
        self._intake = intake
        self._on_change = on_change
        self._versions = Versions(options.sequence_headers.id)
        self._changes = Changes()
        self.hooks = hooks or Hooks()
        self._registering = Registering(
            options,
            intake,
            make_pool,
            metrics,
            environments,
            self._versions,
            self._changes,
            self.hooks,
            self._note_change,
        )
        self.coming = self._registering.coming
        self._starting = Starting(intake, self._registering, self._versions, self._changes)
        self.remarks_of_readiness: list[Callable[[], Iterable[str]]] = []
        self.traffic = TrafficControl(self._versions, self._note_change)
        self.keeping = Keeping(options.undo_window_s, self._end_kept)
        self.mirrors = Mirrors(self._versions)
        self.hooks.after_left.append(self.mirrors.forget)
        self.hooks.uses_archive.append(self._may_want_archive)
        self.rehearsal = Rehearsal(options, self._registering, self._versions, self.mirrors, self.hooks)
        self._swapping = Swapping(
            self._registering,
            self._versions,
            self.rehearsal,
            order=options.swap_order,
            note_change=self._note_change,
        )
        self._rebuilding = Rebuilding(self._registering, self._versions, self._swapping, self._changes)
        self.data_plane = DataPlane(self._versions, self._starting, samples, keeper)
        self._is_leaving = False

    def source_of(self, model: str, version: str) -> str | None:
        """The URL or name that a version was registered with; None for an unknown version."""
        found = self._versions.get(model, version)
        return None if found is None else found.facts.url

    def registered_at(self, model: str) -> float:
        """When the default version of a model was registered, in seconds since 1970. Raises ModelNotFound."""
        return self._versions.find(model, None).since

    def default_of(self, model: str) -> str | None:
        """The default version of a model; None for an unknown model."""
        entry = self._versions.models.get(model)
        return None if entry is None else entry.default

    def stored_archives(self) -> list[str]:
        """The archives and folders in the model store, in order of their names. Blocks."""
        return self._intake.store.names()

    def served_archives(self) -> set[str]:
        """The archives that registered versions came from."""
        return {version.plan.unpacked.archive for version in self._versions.all()}

    def uploads(self, most_bytes: int) -> Uploads:
        """What takes archives of clients into the store, each of at most so many bytes."""
        return Uploads(self._intake, self._registering.is_archive_used, most_bytes)

    # ------------------------------------------------------------------------------------------- register

    async def register(self, parameters: RegisterParameters) -> Registered:
        """Take an archive in and make it a version; the first version of a name is its default.

        Raises BadInput, ArchiveNotFound, BadArchive, VersionConflict, Draining, and for a synchronous call LoadFailed
        when a worker could not load the model. After any error nothing of the registration is left.
        """
        return await self._changes.carry_through(self._registering.register(parameters))

    async def register_unpacked(self, parameters: RegisterParameters, unpacked: Unpacked) -> Registered:
        """As `register`, for an archive that the caller has unpacked; a folder that is not private is not deleted."""
        return await self._changes.carry_through(self._registering.register(parameters, unpacked))

    async def copy(self, wish: CopyParameters) -> Registered:
        """Register a version once more, under another model's name, to be measured: neither snapshots nor documents
        have it, and no client's request that names the model goes there.

        Raises ModelNotFound, VersionNotFound, CopyRefused if the name is that of a model which is no copy, and what
        `register` raises.
        """
        original = self._versions.find(wish.model, wish.version)
        entry = self._versions.models.get(wish.name)
        if entry is not None and not self.is_copy(wish.name):
            raise CopyRefused(wish.model, wish.name)
        return await self.register(copy_parameters(wish, original, self._as_snapshot(original)))

    def is_copy(self, model: str) -> bool:
        """Whether a model is a copy of another one; False for an unknown model."""
        entry = self._versions.models.get(model)
        return entry is not None and all(each.facts.copy_of is not None for each in entry.versions.values())

    async def swap(self, wish: SwapParameters, unpacked: Unpacked | None = None) -> Swapped:
        """Replace a version that serves by that of an archive; returns when the old version has ended.

        No request is refused or lost (`load_first`), and no request that begins afterwards gets the old version. Raises
        what `register` raises, ModelNotFound, VersionNotFound, SwapUnderWay, and SwapFailed when the new version cannot
        load or fails its trial: the old version then goes on, and nothing of the new one is left.
        """
        return await self._changes.carry_through(self._swapping.swap(wish, unpacked))

    async def rebuild(self, version: Version, build: str, name: str, weight_bytes: int) -> Version:
        """Have a listed version served by another build of its model. As `Rebuilding.take_over`."""
        return await self._changes.carry_through(self._rebuilding.take_over(version, build, name, weight_bytes))

    def is_listed(self, version: Version) -> bool:
        """Whether this version itself, not one of its name, is on the list."""
        return self._versions.is_listed(version)

    def version_of(self, model: str, version: str | None) -> Version:
        """The version of this name or label, or the default one. Raises ModelNotFound or VersionNotFound."""
        return self._versions.find(model, version)

    # ------------------------------------------------------------------------------------------- start-up

    async def load_at_start(self, load_models: LoadModels) -> None:
        """Load the models that the setting `load_models` names. Returns when all were tried.

        Does not wait for workers. A model that cannot be registered is logged and left out.
        """
        await self._changes.carry_through(self._starting.load(load_models))

    async def restore(self, versions: Sequence[SnapshotVersion]) -> None:
        """Load the versions of a snapshot, in place of `load_at_start`. Returns when all were tried.

        A version that cannot be registered is logged and left out. It stays in later snapshots, so that a restart with
        its archive mended loads it again.
        """
        await self._changes.carry_through(self._starting.restore(versions))

    @property
    def has_tried_startup(self) -> bool:
        """Whether every model of the start has been tried; no further one will appear by itself."""
        return self._starting.has_tried

    # ------------------------------------------------------------------------------------------- scale

    async def scale(
        self, model: str, version: str | None, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Scaled:
        """Keep between `min_workers` and `max_workers` workers of a version; dead ones start again.

        A `min_workers` of 0 ends them all. Raises BadInput, ModelNotFound, VersionNotFound, Draining, and if
        `synchronous` LoadFailed when a worker could not load the model; the version then stays registered.
        """
        check_workers(min_workers, max_workers)
        if self.data_plane.is_draining:
            raise Draining
        chosen = self._versions.find(model, version)
        self._registering.scale(chosen, min_workers, max_workers)
        min_workers, max_workers = chosen.min_workers, chosen.max_workers
        self._note_change(chosen)
        try:
            progress = await self._changes.carry_through(self._registering.load(chosen, waits=synchronous))
        except LoadFailed as error:
            raise LoadFailed(
                model, version, out_of_memory=error.out_of_memory, reason=error.reason, cause=error.cause or ""
            ) from error
        return Scaled(model, version, min_workers, progress)

    def remark(self, model: str, version: str | None, sentences: Iterable[str]) -> None:
        """Note what was odd about a call for a version, in the log and in describe's warnings. Each sentence once.

        Raises ModelNotFound, VersionNotFound.
        """
        remark(self._versions.find(model, version), sentences)

    def tune(self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None) -> str:
        """Change how batches are formed, at once and without a restart. Returns a sentence with the values in force.

        Raises BadInput, ModelNotFound, VersionNotFound, Draining.
        """
        check_batching(batch_size, max_batch_delay_s)
        if self.data_plane.is_draining:
            raise Draining
        chosen = self._versions.find(model, version)
        chosen.pool.reconfigure(batch_size=batch_size, max_batch_delay_s=max_batch_delay_s)
        self._note_change(chosen)
        options = chosen.options
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

        Raises ModelNotFound, VersionNotFound, and what `Pool.check` raises.
        """
        chosen = self._versions.find(model, version)
        report = await chosen.pool.check(samples)
        return {"modelName": chosen.model, "modelVersion": chosen.name, **report}

    async def replay(self, model: str, version: str | None, requests: Sequence[Request]) -> tuple[str, Replayed]:
        """Run kept requests again as one batch, in a worker of a version (or label); and which version that is.

        Raises ModelNotFound, VersionNotFound, and what `Pool.replay` raises.
        """
        chosen = self._versions.find(model, version)
        return chosen.name, await chosen.pool.replay(requests)

    async def profile(
        self, model: str, version: str | None, wish: ProfileWish, begun: Callable[[list[int]], None]
    ) -> tuple[str, TakenProfile]:
        """Have one worker of a version (or label) measure its batches; and which version that is. As `Pool.profile`.

        Raises ModelNotFound, VersionNotFound, and what `Pool.profile` raises.
        """
        chosen = self._versions.find(model, version)
        return chosen.name, await chosen.pool.profile(wish, begun)

    def profile_progress(self, model: str, version: str | None) -> tuple[str, tuple[float, int] | None]:
        """Which version that is, and for how long it is profiled, with how many requests; None while it is not."""
        chosen = self._versions.find(model, version)
        return chosen.name, chosen.pool.profiles.progress

    # ------------------------------------------------------------------------------------------- describe, list

    def describe(self, model: str, version: str | None = None) -> dict[str, Any]:
        """The describe answer of a version. Raises ModelNotFound or VersionNotFound."""
        return self._describe(self._versions.find(model, version))

    def is_autoscaled(self, model: str, version: str | None = None) -> bool:
        """Whether the number of a version's workers follows the need. Raises ModelNotFound or VersionNotFound."""
        return self._versions.find(model, version).facts.options.autoscale

    def describe_all(self, model: str) -> list[dict[str, Any]]:
        """The describe answers of a model's versions, oldest first. Raises ModelNotFound."""
        return [self._describe(version) for version in self._versions.model(model).versions.values()]

    async def describe_customized(
        self,
        model: str,
        version: str | None = None,
        within_s: float | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> tuple[dict[str, Any], Answer]:
        """As `describe`, with the handler's metadata in `customizedMetadata`; and the handler's whole answer.

        `within_s` is the client's deadline, in seconds from now; `headers` are the client's. Raises ModelNotFound,
        VersionNotFound, NoDescribeWorker, HandlerFailed and the errors of any request.
        """
        chosen = self._versions.find(model, version)
        limit_s = chosen.facts.options.response_timeout_s
        answer = await ask_for_metadata(chosen.pool, model, limit_s, within_s, headers)
        described = self._describe(chosen)
        metadata = await asyncio.to_thread(read_metadata, answer.body)
        if metadata is not None:
            described["customizedMetadata"] = metadata
        return described, answer

    def _describe(self, version: Version) -> dict[str, Any]:
        described = describe_version(
            version.facts,
            version.pool,
            version.options,
            is_default=self._versions.is_default(version),
            remarks=version.remarks,
            as_torchserve=self._options.as_torchserve,
        )
        described |= self._versions.describe_role(version)
        if version.optimising is not None and not self._options.as_torchserve:
            described["optimising"] = to_builtins(version.optimising)
        # Fetches whose version is not known yet are shown by the default version.
        arriving = [
            each
            for each in self.coming.of(version.model)
            if described["isDefault"] or each.get("modelVersion") == version.name
        ]
        return {**described, "arriving": arriving} if arriving else described

    def offered_names(self, limit: int | None = None, offset: int | None = None) -> OfferedNames:
        """One page of the models in order of their names, each with its default version."""
        page = self.list_models(limit, offset)
        models = []
        for name, _ in page.models:
            default = self._versions.find(name, None)
            models.append(OfferedName(name, default.name, state_of(default.pool, default.min_workers)))
        token = None if page.next_offset is None else str(page.next_offset)
        return OfferedNames(nextPageToken=token, models=models, workflows=[])

    def offered(self, model: str) -> OfferedModel:
        """A model's versions, oldest first, and what each takes. Raises ModelNotFound."""
        return OfferedModel(model, [self._offer(each) for each in self._versions.model(model).versions.values()])

    def declaration_of(self, model: str, version: str | None = None) -> Mapping[str, Any] | None:
        """Which tensors a call of the Open Inference Protocol to a version (the default one) may have.

        In the form of a declaration, None for nothing. Raises ModelNotFound or VersionNotFound.
        """
        found = self._versions.find(model, version)
        load = found.plan.load
        return protocol_tensors(load.handler, load.envelope, declared_by(found.facts, found.pool))

    def takes_tensors(self, model: str, version: str | None = None) -> bool:
        """Whether a version declares named tensors, or elements of one, and no envelope hides them from its handler.

        Raises ModelNotFound or VersionNotFound.
        """
        found = self._versions.find(model, version)
        declaration = declared_by(found.facts, found.pool)
        if declaration is None or not reads_tensors(found.plan.load.handler, found.plan.load.envelope):
            return False
        return declaration.get("kind") == "tensors" or takes_elements(declaration)

    def runs_elsewhere(self, model: str, version: str | None = None) -> bool:
        """Whether a version's workers are on other machines. Raises ModelNotFound or VersionNotFound."""
        return self._versions.find(model, version).facts.options.ray is not None

    def all_offered(self) -> list[OfferedModel]:
        """Every model with its versions, in order of their names; workflows' functions are left out."""
        models = self._versions.models
        shown = (name for name, entry in models.items() if not entry.versions[entry.default].facts.is_function)
        return [self.offered(name) for name in sorted(shown)]

    def version_metrics(self, model: str | None = None, version: str | None = None) -> list[VersionMetrics]:
        """The counts of a version, of all versions of a model, or of all. Raises ModelNotFound or VersionNotFound."""
        if model is not None and version is not None:
            return [self._versions.find(model, version).pool.metrics]
        names = [each.name for each in self.all_offered()] if model is None else [model]
        return [each.pool.metrics for name in names for each in self._versions.model(name).versions.values()]

    def _offer(self, version: Version) -> OfferedVersion:
        load = version.plan.load
        return OfferedVersion(
            version=version.name,
            isDefault=self._versions.is_default(version),
            state=state_of(version.pool, version.min_workers),
            labels=self._versions.describe_role(version).get("labels"),
            expects=expected_input(load.handler, load.envelope),
            declaration=None if version.pool.declaration is None else dict(version.pool.declaration),
        )

    def arriving(self, model: str, version: str | None = None) -> list[dict[str, Any]]:
        """The progress of fetches that may become this version of a model; the model need not exist yet."""
        return self.coming.of(model, version)

    def processes(self) -> list[tuple[VersionMetrics, list[int]]]:
        """The processes on this machine that work for each version."""
        pools = [version.pool for version in self._versions.all()]
        return [(pool.metrics, [pid for pids in pool.pids_by_worker for pid in pids]) for pool in pools]

    async def sample_figures(self, now: float) -> None:
        """Keep each version's counts as they are now (monotonic), for its figures of the last minutes."""
        for number, version in enumerate(list(self._versions.all()), 1):
            version.pool.metrics.sample(now)
            if number % _SAMPLED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def activities(self, now: float) -> Iterator[VersionActivity]:
        """What each version does now (monotonic) and did in the last minute; workflows' functions are left out.

        Each is made when it is asked for. Reads `/proc`.
        """
        for version in list(self._versions.all()):
            if not version.facts.is_function:
                yield activity_of(version, now, is_default=self._versions.is_default(version))

    def answer_times(self) -> Histogram:
        """From arrival to answer, in seconds, as the versions that are there have counted; without functions."""
        every = (v.pool.metrics.total_seconds for v in self._versions.all() if not v.facts.is_function)
        each = [one for one in every if one.sum]  # of a thousand models most are idle
        whole = Histogram(SECONDS_BOUNDS)
        whole.buckets = [sum(counts) for counts in zip(whole.buckets, *(one.buckets for one in each), strict=True)]
        whole.sum = sum(one.sum for one in each)
        return whole

    def list_models(self, limit: int | None = None, offset: int | None = None) -> ModelPage:
        """One page of the models in order of their names."""
        defaults = ((name, entry.versions[entry.default].facts) for name, entry in self._versions.models.items())
        names = [(name, hide_query(facts.url)) for name, facts in defaults if not facts.is_function]
        return ModelPage(*page_of(names, limit=limit, offset=offset))

    # ------------------------------------------------------------------------------------------- unregister, default

    async def unregister(self, model: str, version: str | None = None, *, force: bool = False) -> None:
        """Take a version off the list, answer what it had accepted, end its workers, delete its folder.

        The archive is deleted, too, if the server fetched it and no other version needs it.
        A version with a weight or a label is removed only with `force`, and loses them; the last version of a model is
        removed anyhow. For a version whose requirements are being installed the installation is given up. Raises
        ModelNotFound, VersionNotFound, DefaultVersionInUse, VersionInUse, and CleanUpTimedOut when ending its workers
        takes too long; they are then ended in the background.
        """
        if self._starting.forget(model, version):
            self._on_change()
        being_installed = self._registering.installations.find(model, version)
        if being_installed and (model not in self._versions.models or version is not None):
            for claim in being_installed:
                claim.give_up()
            await asyncio.gather(*(claim.wait_until_ended() for claim in being_installed))
            return
        chosen = self._versions.find_leaver(model, version, force=force)
        self._registering.remove(chosen)
        self._note_change(chosen)
        retiring = self._registering.retire(chosen, deletes_fetched=not self.data_plane.is_draining)
        await self._changes.carry_through(retiring)

    def check_is_no_node(self, model: str, version: str | None) -> None:
        """Raise NodeInUse for a version (the default one) that is a node of a workflow. TorchServe lets it go."""
        try:
            found = self._versions.find(model, version)
        except (ModelNotFound, VersionNotFound):
            return
        if found.facts.workflow is not None and not self._options.as_torchserve:
            raise NodeInUse(model, found.facts.workflow)

    def _may_want_archive(self, name: str) -> bool:
        """Whether a kept version came from this archive, or one of the snapshot that could not be restored."""
        return any(kept.version.plan.unpacked.archive == name for kept in self.keeping.all()) or any(
            restored.archive == name for restored in self._starting.unrestored.values()
        )

    def set_default(self, model: str, version: str) -> None:
        """Let `version` answer requests that name none, from now on. Raises ModelNotFound or VersionNotFound."""
        self._note_change(self._versions.set_default(model, version))

    # ------------------------------------------------------------------------------------------- desired state

    def name_of(self, model: str, version: str | None) -> str:
        """The version of this name or label, or the default one. Raises ModelNotFound or VersionNotFound."""
        return self._versions.find(model, version).name

    @contextlib.asynccontextmanager
    async def looking_into(self, parameters: RegisterParameters) -> AsyncIterator[tuple[str, str]]:
        """The names of the model and the version that a registration would make; nothing is registered.

        The archive stays unpacked while the block runs: a change that loads this version from this address uses it and
        fetches nothing. If the block raises, the store keeps no file of it. Raises as `register` does before it starts
        workers.
        """
        unpacked = await self._registering.take_in(replace(parameters, freshness="now"))
        try:
            async with self._lending(parameters, unpacked) as names:
                yield names
        except BaseException:
            await asyncio.to_thread(unpacked.take_away)
            raise

    @contextlib.asynccontextmanager
    async def _lending(self, parameters: RegisterParameters, unpacked: Unpacked) -> AsyncIterator[tuple[str, str]]:
        plan = await self._registering.plan(parameters, unpacked)
        options = plan.facts.options
        lent, key = (
            self._registering.lent,
            replace(parameters, model_name=options.model, version=options.version).lent_as,
        )
        is_lent = lent.setdefault(key, unpacked) is unpacked  # else another call is about to load the same
        try:
            yield options.model, options.version
        finally:
            is_taken = is_lent and lent.get(key) is not unpacked
            if not is_taken:
                if is_lent:
                    del lent[key]
                await asyncio.to_thread(unpacked.discard)

    def actual(self) -> ActualState:
        """The registered models, for comparison with a desired state. Nodes of workflows are left out."""
        return {name: actual for name in self._versions.models if (actual := self._look_at(name)) is not None}

    def _look_at(self, name: str) -> ActualModel | None:
        entry = self._versions.model(name)
        versions = {
            version.name: look_at(version, self._options)
            for version in entry.versions.values()
            if version.facts.is_operators
        }
        if not versions:
            return None
        rule, shadow = self.traffic.rule_of(name), self.mirrors.shadow_of(name)
        labels = {label: described["version"] for label, described in self.traffic.labels(name).items()}
        return ActualModel(
            versions,
            entry.default,
            labels,
            None if rule is None else rule.document(),
            None if shadow is None else shadow.spec.document(),
        )

    def begin_change(self) -> Transaction:
        """Begin to change several models at once."""
        if self.data_plane.is_draining:
            raise Draining
        return Transaction(
            self._registering,
            self._versions,
            self._changes,
            self.traffic,
            self.mirrors,
            self.keeping,
            self._note_change,
        )

    def _end_kept(self, versions: Iterable[Version]) -> None:
        for version in versions:
            self._changes.follow(self._registering.end(version))

    def find_kept(self, model: str, version: str, of: str | None) -> ActualVersion | None:
        """The kept version of this name, which could answer at once; with `of` only if it served that state."""
        found = self.keeping.find(model, version)
        return None if found is None or of not in (None, found.of) else look_at(found.version, self._options)

    def kept(self) -> list[dict[str, Any]]:
        """Versions that take no requests and stay loaded, so that a desired state can bring them back at once."""
        return [
            {
                "model": kept.version.model,
                "version": kept.version.name,
                "secondsLeft": round(self.keeping.left_s(kept), 1),
                "workers": kept.version.pool.ready_workers,
                **_held_bytes(kept.version),
            }
            for kept in self.keeping.all()
        ]

    @property
    def startup_failures(self) -> list[str]:
        """Sentences about models of the start that could not be registered."""
        return list(self._starting.failures)

    async def wait_until_loaded(self) -> list[str]:
        """Wait until workers have loaded the models of the start; sentences about models that they cannot load."""
        return [f"{error}: {error.reason}" for error in await self.failed_loads()]

    async def failed_loads(self) -> list[LoadFailed]:
        """Wait until workers have loaded the models of the start; the errors of those that they cannot load."""
        return await self._starting.failed_loads()

    async def wait_for_loads(self) -> None:
        """Wait until the models of the start are loaded, or cannot be. The waiting task may be cancelled."""
        await self._starting.wait_for_loads()

    def end_start(self, models: Iterable[str], failures: Iterable[str]) -> None:
        """Note that another part than the registry tried the models of the start; `failures` are sentences."""
        self._starting.models += [model for model in models if model not in self._starting.models]
        self._starting.failures += failures
        self._starting.end()

    # ------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> list[SnapshotVersion]:
        """Every version as a later start would restore it. Nodes of workflows are left out."""
        listed = [self._as_snapshot(version) for version in self._versions.all() if version.facts.is_operators]
        names = {(version.model, version.version) for version in listed}
        return [*listed, *(version for key, version in self._starting.unrestored.items() if key not in names)]

    def _as_snapshot(self, version: Version) -> SnapshotVersion:
        facts, own = version.facts, version.plan.unpacked.manifest.handler or self._options.default_handler
        handler = version.plan.load.handler
        ranks = facts.options.parallel_level or facts.config.parallel_level
        return SnapshotVersion(
            model=version.model,
            version=version.name,
            archive=version.plan.unpacked.archive or archive_name(facts.url),
            is_default=self._versions.is_default(version),
            options=Said(facts.asked, said_of(version.options, *IN_FORCE), {"parallel_level": ranks or None}),
            runtime=facts.runtime,
            handler=handler if handler != own else None,
            role=self._versions.role_of(version),
        )

    def _note_change(self, version: Version) -> None:
        if version.facts.is_operators:
            self._on_change()

    # ------------------------------------------------------------------------------------------- health

    @property
    def states(self) -> StateChanges:
        """Called at each change of what `readiness` and `is_serving` say."""
        return self._versions.states

    def is_serving(self, model: str) -> bool:
        """Whether requests for a model should be sent here. Raises ModelNotFound."""
        return self.data_plane.is_model_ready(model) and not self._is_leaving

    def readiness(self) -> Readiness:
        """Whether the server should get requests, and why not."""
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
            for version in self._versions.defaults()
        ]
        found = judge(
            standings,
            is_draining=self._is_leaving,
            has_tried_startup=self._starting.has_tried,
            startup_failures=self._starting.failures,
        )
        further = [sentence for tell in self.remarks_of_readiness for sentence in tell()]
        return replace(found, remarks=(*found.remarks, *further)) if further else found

    # ------------------------------------------------------------------------------------------- the end

    def begin_drain(self) -> None:
        """Turn readiness off, because the server will stop; requests are still taken."""
        self._is_leaving = True
        self.states.tell()

    def refuse_new(self) -> None:
        """Refuse new requests and registrations from now on; accepted ones go on."""
        self._is_leaving = self.data_plane.is_draining = True
        self.states.tell()
        self._registering.refuse_new()
        self.keeping.close()
        self.mirrors.refuse_new()

    async def stop(self) -> None:
        """End every version and delete every folder, after new requests are refused.

        Order: shadows, pools, changes under way, folders.
        """
        self.refuse_new()
        await self.mirrors.stop()
        self._registering.end_all()
        await self._changes.end(STOP_LIMIT_S)
        await asyncio.to_thread(self._intake.clear)


def _held_bytes(version: Version) -> dict[str, Any]:
    """What a version holds in memory; empty without a memory ledger."""
    held_bytes = version.pool.held_bytes
    return {} if held_bytes is None else {"memoryBytes": held_bytes}
