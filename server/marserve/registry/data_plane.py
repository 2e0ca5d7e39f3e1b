"""A request's way in: which version answers it, whether that is ready, and the end of what was accepted.

It finds models in the table (`catalogue/versions.py`) and changes nothing there. Each surface for inference, and each
node of a workflow, submits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from marserve.errors import DrainedAway, Draining, MarserveError, ModelNotFound, NoTicket, NoWorker, QueueFull
from marserve.messages import Accepted, Receiver, Request
from marserve.pool.dispatch.queue import GivenUp
from marserve.pool.pool import Pool
from marserve.registry.catalogue.named_answers import NamedReceiver
from marserve.registry.catalogue.readiness import ModelReadiness, why_not_ready
from marserve.registry.catalogue.traffic import choose_version
from marserve.registry.catalogue.versions import Model, Versions
from marserve.registry.changes.load_at_start import Starting
from marserve.telemetry.body_samples import BodySamples
from marserve.telemetry.kept_requests import KeptRequests


class DataPlane:
    """Requests to all models of a server. Every method is called on the event loop.

    With `is_draining` it refuses requests, except those that an accepted request makes.
    """

    def __init__(
        self,
        versions: Versions,
        starting: Starting,
        samples: BodySamples | None = None,
        keeper: KeptRequests | None = None,
    ) -> None:
        """`samples` has bodies of some requests written to the log, `keeper` keeps some to be run again."""
        self._samples, self._keeper = samples, keeper
        self._are_watched = samples is not None or keeper is not None
        self._versions = versions
        self._models = versions.models  # for every request: one step less
        self._starting = starting
        self.is_draining = False

    def submit(self, model: str, version: str | None, request: Request, receiver: Receiver) -> Accepted:
        """Hand a request to the version it names, or to the default one.

        Raises Draining, ModelNotFound, VersionNotFound, and what the pool raises: NoWorker, QueueFull, NoTicket,
        FingerprintRefused.
        """
        if self.is_draining and not request.is_inner:
            raise Draining
        entry = self._models.get(model)
        if entry is None:
            raise ModelNotFound(model, self._models.keys())
        if self._are_watched:
            return self._submit_watched(entry, version, request, receiver)
        if not entry.is_plain or request.asked_version is not None:
            return self._submit_chosen(entry, version, request, receiver)
        pool = choose_version(model, entry.versions, entry.default, version).pool
        try:
            return pool.submit(request, receiver)
        except NoWorker as error:
            if version is None:
                raise
            raise _naming(error, model, version) from None

    def _submit_watched(self, entry: Model, named: str | None, request: Request, receiver: Receiver) -> Accepted:
        """The same for a request of which more is written down than its times."""
        if self._samples is not None:
            receiver = self._samples.watch(entry.name, request, receiver)
        if self._keeper is None:
            return self._submit_chosen(entry, named, request, receiver)
        watched = self._keeper.watch(request, receiver)
        job = watched.job = self._submit_chosen(entry, named, request, watched)
        return job

    def _submit_chosen(self, entry: Model, named: str | None, request: Request, receiver: Receiver) -> Accepted:
        """Hand a request to the version chosen for it; a header of the answer names that version."""
        chosen, reason = entry.choose(named, request)
        if not entry.is_plain:
            receiver = NamedReceiver(receiver, chosen.header)
        pool, beside = chosen.pool, entry.beside
        try:
            job: Accepted
            if beside is None:
                job = pool.submit(request, receiver)
            else:
                is_asked = reason in ("path", "override")
                job = beside.submit(pool, chosen.name, is_asked=is_asked, request=request, receiver=receiver)
        except MarserveError as error:
            if isinstance(error, NoWorker) and reason in ("path", "override"):
                error = _naming(error, entry.name, named or request.asked_version)
            if not entry.is_plain:
                error.version_header = chosen.header
            raise error from None
        if reason not in ("path", "default") and not request.is_inner:
            pool.metrics.chosen[reason] += 1
        return job

    # ------------------------------------------------------------------------------------------- who would answer

    @property
    def only_startup_model(self) -> str | None:
        """The model loaded at the start, if there is exactly one: `/invocations` may leave its name out."""
        return self._starting.models[0] if len(self._starting.models) == 1 else None

    def check_exists(self, model: str, version: str | None = None) -> None:
        """Return if the version is registered (without a version: if the model is).

        Raises ModelNotFound or VersionNotFound.
        """
        self._versions.find(model, version)

    def has_envelope(self, model: str, version: str | None = None) -> bool:
        """Whether an envelope stands around the handler of a version (the default one).

        Raises ModelNotFound or VersionNotFound.
        """
        return bool(self._versions.find(model, version).plan.load.envelope)

    def version_names(self, model: str) -> list[str]:
        """The versions of a model, oldest first. Raises ModelNotFound."""
        return list(self._versions.model(model).versions)

    def is_healthy(self) -> bool:
        """The contract's rule for `/ping`: no default version has given up more workers than it can spare."""
        return all(version.pool.is_healthy for version in self._versions.defaults())

    def is_model_ready(self, model: str, version: str | None = None) -> bool:
        """Whether the version (the default one) has at least `min_workers` workers that loaded it, and at least one.

        A version that sleeps until its next request is ready. Raises ModelNotFound or VersionNotFound.
        """
        chosen = self._versions.find(model, version)
        may_sleep = chosen.facts.options.idle_timeout_s is not None and not chosen.min_workers
        if may_sleep and chosen.max_workers and not chosen.pool.workers():
            return True
        return chosen.pool.ready_workers >= max(1, chosen.min_workers)

    def readiness_of(self, model: str, version: str | None = None) -> ModelReadiness:
        """The same, and why it cannot answer; none can while the server drains.

        Raises ModelNotFound or VersionNotFound.
        """
        chosen = self._versions.find(model, version)
        is_ready, needed = self.is_model_ready(model, version), max(1, chosen.min_workers)
        reason = "" if is_ready else why_not_ready(chosen.pool.workers(), needed, time.time())
        if self.is_draining:
            is_ready, reason = False, "the server is shutting down"
        return ModelReadiness(is_ready, reason, chosen.pool.ready_workers, needed)

    def has_loaded_model(self) -> bool:
        """Whether a worker of any model's default version has loaded it."""
        return any(version.pool.ready_workers for version in self._versions.defaults())

    # ------------------------------------------------------------------------------------------- the end

    async def drain(self, deadline_s: float) -> int:
        """Wait until nothing is queued or running, for at most `deadline_s`; returns how many requests are left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                # Look again after each wait: a workflow's request may have gone from one pool to another.
                while busy := [pool for pool in self._pools() if pool.queued + pool.running]:
                    await asyncio.gather(*(pool.wait_until_idle() for pool in busy))
        return self.under_way

    @property
    def under_way(self) -> int:
        """How many requests are queued or running."""
        return sum(pool.queued + pool.running for pool in self._pools())

    def refuse_accepted(self) -> list[tuple[str, str, Sequence[GivenUp]]]:
        """Refuse all requests that were accepted and are not answered yet.

        Returns model, version and requests of each version that had any.
        """
        return [
            (version.model, version.name, requests)
            for version in (*self._versions.all(), *self._versions.leaving)
            if (requests := version.pool.refuse_accepted(DrainedAway()))
        ]

    def _pools(self) -> list[Pool]:
        return [version.pool for version in (*self._versions.all(), *self._versions.leaving)]


def _naming(error: NoWorker, model: str, version: str | None) -> NoWorker:
    """The error in the contract's text for a client that named the version; the pool does not know that."""
    if type(error) in (NoWorker, QueueFull, NoTicket):
        return type(error)(model, version, retry_after_s=error.retry_after_s, death=error.death)
    return error
