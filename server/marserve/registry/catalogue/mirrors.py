"""What may be asked and ordered beside a model's traffic: its shadow, the watch over its arms, requests handed over.

What a shadow does is `registry/observing/shadow.py`'s, what is counted of arms `registry/observing/arms.py`'s; both
hang on the table (`versions.py`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from marserve.errors import BadInput, NoWorker, ShadowNotFound, VersionNotFound
from marserve.messages import Accepted, Receiver, Request
from marserve.pool.checks.certifier import can_lend
from marserve.pool.pool import Pool
from marserve.registry.catalogue.named_answers import NamedReceiver
from marserve.registry.catalogue.versions import Model, Version, Versions
from marserve.registry.observing.arms import Arm
from marserve.registry.observing.observers import Beside
from marserve.registry.observing.shadow import Shadow, ShadowSpec

log = logging.getLogger("marserve.registry")


class Mirrors:
    """The shadows and watches of one registry's models. Every method is called on the event loop."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._shadows: dict[str, Shadow] = {}
        self._ending: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------------------------------------- shadows

    def put(self, model: str, spec: ShadowSpec, *, dry_run: bool = False) -> dict[str, Any]:
        """Mirror from now on what `spec` says, in the place of what was mirrored before. Returns the description.

        With `dry_run` it is only checked. Raises ModelNotFound, VersionNotFound, and BadInput for a version that cannot
        be a shadow: the only one, one with sequences, one whose workers cannot compare.
        """
        entry = self._versions.model(model)
        version = entry.versions.get(spec.version)
        if version is None:
            raise VersionNotFound(model, spec.version)
        self._check(entry, version, spec)
        if dry_run:
            return spec.document()
        self._end_shadow(model)
        name = spec.version
        shadow = Shadow(spec, lambda: self.pool_of(model, name), lambda: self._has_own_requests(model, name))
        self._beside(entry).shadow = self._shadows[model] = shadow
        shadow.start()
        log.info("Model %s: %g of its requests are mirrored to version %s", model, spec.share, name)
        return shadow.describe()

    def _check(self, entry: Model, version: Version, spec: ShadowSpec) -> None:
        if len(entry.versions) < 2:
            raise BadInput(
                f"{version.name} is the only version of model {entry.name}: there is nobody whose requests to mirror. "
                "Register another version first."
            )
        if entry.default == version.name and entry.rule is None:
            raise BadInput(
                f"Version {version.name} answers all requests of model {entry.name} itself; mirror them to another."
            )
        options = version.pool.options
        if options.sequences is not None:
            raise BadInput(f"Version {version.name} has sequences, of which a share cannot be mirrored.")
        if spec.compare != "exact" and not can_lend(options):
            raise BadInput(
                f"Workers of version {version.name} cannot compare answers: they run in steps, or many calls at once. "
                'Compare with "exact".'
            )

    def describe(self, model: str) -> dict[str, Any]:
        """What the model's shadow is and has done. Raises ModelNotFound, ShadowNotFound."""
        return self._shadow(model).describe()

    def shadow_of(self, model: str) -> Shadow | None:
        """The model's shadow, None where it, or the model, is not there."""
        entry = self._versions.models.get(model)
        return None if entry is None or entry.beside is None else entry.beside.shadow

    def remove(self, model: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Mirror nothing more; copies under way are cancelled. Returns the last description.

        Raises ModelNotFound, ShadowNotFound.
        """
        told = self._shadow(model).describe()
        if not dry_run:
            self._end_shadow(model)
            log.info("Model %s: its requests are mirrored no more", model)
        return told

    def _shadow(self, model: str) -> Shadow:
        self._versions.model(model)
        shadow = self.shadow_of(model)
        if shadow is None:
            raise ShadowNotFound(model)
        return shadow

    def forget(self, version: Version) -> None:
        """A version has left; with the last one of a model goes its shadow, also where its name came back meanwhile."""
        shadow = self._shadows.get(version.model)
        if shadow is not None and shadow is not self.shadow_of(version.model):
            self._end_shadow(version.model)

    def _end_shadow(self, model: str) -> None:
        """At once, as far as requests are concerned; a comparison under way is waited for by a task of its own."""
        shadow = self._shadows.pop(model, None)
        if shadow is None:
            return
        entry = self._versions.models.get(model)
        if entry is not None and entry.beside is not None and entry.beside.shadow is shadow:
            entry.beside.shadow = None
            self._tidy(entry)
        shadow.stop_now()
        ending = asyncio.create_task(shadow.wait_until_stopped())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def refuse_new(self) -> None:
        """Mirror nothing more: a server that drains waits for requests, not for copies of them."""
        for model in list(self._shadows):
            self._end_shadow(model)

    async def stop(self) -> None:
        """End every shadow."""
        self.refuse_new()
        if self._ending:
            await asyncio.wait(self._ending)

    # ---------------------------------------------------------------------------------------------- arms

    def watch(self, model: str, baseline: str, candidate: str) -> dict[str, Arm]:
        """Count from now on what these versions do with requests that named none.

        What the candidate cannot run to its end, because its worker dies or it takes nothing, the baseline answers (or
        what was put in its place meanwhile), unless the candidate's `retryOnWorkerDeath` is off. Raises ModelNotFound,
        VersionNotFound.
        """
        entry = self._versions.model(model)
        tried = entry.find(candidate)
        entry.find(baseline)

        def rescue(request: Request, receiver: Receiver) -> Accepted:
            serves = self._serving(model, baseline, candidate)
            job = serves.pool.submit(request, receiver)
            _rename(receiver, serves.header)
            return job

        may_rescue = tried.pool.options.retry_on_worker_death
        arms = {baseline: Arm(), candidate: Arm(rescue=rescue if may_rescue else None)}
        self._beside(entry).arms = arms
        return arms

    def _serving(self, model: str, baseline: str, candidate: str) -> Version:
        """Who answers in the candidate's place now: the baseline by its name, for it may have been swapped; where it is
        listed no more, the default version, if that is another than the candidate. Raises ModelNotFound, NoWorker.
        """
        entry = self._versions.model(model)
        found = entry.versions.get(baseline, entry.versions[entry.default])
        if found.name == candidate:
            raise NoWorker(model)
        return found

    def unwatch(self, model: str) -> None:
        """Count nothing more. A model that is not there has no watch."""
        entry = self._versions.models.get(model)
        if entry is not None and entry.beside is not None:
            entry.beside.arms = {}
            self._tidy(entry)

    def hand_over(self, model: str, giver: str, taker: str) -> int:
        """Have `taker` answer the requests that wait for `giver` and did not name it; returns how many.

        Raises ModelNotFound, VersionNotFound.
        """
        entry = self._versions.model(model)
        given, taken = entry.find(giver), entry.find(taker)
        return given.pool.hand_over(taken.pool, lambda receiver: _rename(receiver, taken.header))

    def default_of(self, model: str) -> str:
        """The version that answers requests that name none, where no weights are put. Raises ModelNotFound."""
        return self._versions.model(model).default

    def pool_of(self, model: str, version: str) -> Pool | None:
        """The pool of a version as it is registered now, None where it is not: it tells two of one name apart."""
        entry = self._versions.models.get(model)
        found = None if entry is None else entry.versions.get(version)
        return None if found is None else found.pool

    # ---------------------------------------------------------------------------------------------- inside

    def _beside(self, entry: Model) -> Beside:
        if entry.beside is None:
            entry.beside = Beside()
        return entry.beside

    def _tidy(self, entry: Model) -> None:
        if entry.beside is not None and entry.beside.is_empty:
            entry.beside = None

    def _has_own_requests(self, model: str, version: str) -> bool:
        entry = self._versions.models.get(model)
        found = None if entry is None else entry.versions.get(version)
        return entry is not None and found is not None and entry.share_of(found) > 0


def _rename(receiver: Receiver, header: tuple[str, str]) -> None:
    """Have the answer name the version that gives it, whatever stands between the pool and the client."""
    inner: Any = receiver
    while inner is not None:
        if isinstance(inner, NamedReceiver):
            inner.rename(header)
        inner = getattr(inner, "receiver", None)
