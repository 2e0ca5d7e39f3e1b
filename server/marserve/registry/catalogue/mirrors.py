"""Calls about what follows a model's traffic: its shadow, its watched arms, and requests handed over.

`registry/observing/shadow.py` is the shadow, `registry/observing/arms.py` counts for arms; a `Model` of the table
(`versions.py`) refers to both.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from marserve.errors import BadInput, NoWorker, ShadowNotFound, VersionNotFound
from marserve.messages import Accepted, Receiver, Request
from marserve.pool.checks.certifier import can_lend
from marserve.pool.pool import Pool
from marserve.registry.catalogue.named_answers import NamedReceiver
from marserve.registry.catalogue.versions import Model, Version, Versions
from marserve.registry.observing.arms import Arm
from marserve.registry.observing.observers import Beside
from marserve.registry.observing.shadow import Shadow
from marserve.registry.observing.shadow_spec import ShadowSpec, read_shadow

log = logging.getLogger("marserve.registry")


class Mirrors:
    """The shadows and watches of one registry's models. Every method is called on the event loop."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._shadows: dict[str, Shadow] = {}
        self._ending: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------------------------------------- shadows

    def put(self, model: str, spec: ShadowSpec, *, dry_run: bool = False) -> dict[str, Any]:
        """Mirror requests by `spec` from now on, in place of the model's shadow before. Returns the description.

        With `dry_run` the spec is only checked. Raises ModelNotFound, VersionNotFound, and BadInput for a version that
        cannot be a shadow: the only one, one with sequences, one whose workers cannot compare.
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
                f"{version.name} is the only version of model {entry.name}: no other one has requests to mirror. "
                "Register another version first."
            )
        if entry.default == version.name and entry.rule is None:
            raise BadInput(
                f"Version {version.name} answers all requests of model {entry.name} itself; mirror them to another."
            )
        options = version.facts.options
        if options.sequences is not None:
            raise BadInput(f"Version {version.name} has sequences, of which a share cannot be mirrored.")
        if spec.compare != "exact" and not can_lend(options):
            raise BadInput(
                f"Workers of version {version.name} cannot compare answers: they run in steps, or many calls at once. "
                'Compare with "exact".'
            )

    def describe(self, model: str) -> dict[str, Any]:
        """The shadow's spec and counts. Raises ModelNotFound, ShadowNotFound."""
        return self._shadow(model).describe()

    def shadow_of(self, model: str) -> Shadow | None:
        """The model's shadow; None without one, or for an unknown model."""
        entry = self._versions.models.get(model)
        return None if entry is None or entry.beside is None else entry.beside.shadow

    def remove(self, model: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Stop mirroring; copies under way are cancelled. Returns the last description.

        Raises ModelNotFound, ShadowNotFound.
        """
        description = self._shadow(model).describe()
        if not dry_run:
            self._end_shadow(model)
            log.info("Model %s: its requests are mirrored no more", model)
        return description

    def put_document(self, model: str, document: Mapping[str, Any] | None) -> None:
        """As `put` of what a client would send; None removes the shadow, if there is one. Raises BadInput, too."""
        if document is not None:
            self.put(model, read_shadow(document))
        elif self.shadow_of(model) is not None:
            self.remove(model)

    def _shadow(self, model: str) -> Shadow:
        self._versions.model(model)
        shadow = self.shadow_of(model)
        if shadow is None:
            raise ShadowNotFound(model)
        return shadow

    def forget(self, version: Version) -> None:
        """A version has left: end its model's shadow if the model is gone, even if its name is registered again."""
        shadow = self._shadows.get(version.model)
        if shadow is not None and shadow is not self.shadow_of(version.model):
            self._end_shadow(version.model)

    def _end_shadow(self, model: str) -> None:
        """Stop mirroring at once; a task of its own waits for a comparison under way."""
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
        """Stop mirroring: a server that drains waits for requests, not for copies of them."""
        for model in list(self._shadows):
            self._end_shadow(model)

    async def stop(self) -> None:
        """End every shadow."""
        self.refuse_new()
        if self._ending:
            await asyncio.wait(self._ending)

    # ---------------------------------------------------------------------------------------------- arms

    def watch(self, model: str, baseline: str, candidate: str) -> dict[str, Arm]:
        """Count from now on what these versions do with requests that name no version.

        A request that the candidate cannot run to its end, because its worker dies or it takes no request, is answered
        by the baseline (or the version that replaced it), unless the candidate's `retryOnWorkerDeath` is off. Raises
        ModelNotFound, VersionNotFound.
        """
        entry = self._versions.model(model)
        tried = entry.find(candidate)
        entry.find(baseline)

        def rescue(request: Request, receiver: Receiver) -> Accepted:
            serves = self._serving(model, baseline, candidate)
            job = serves.pool.submit(request, receiver)
            _rename(receiver, serves.header)
            return job

        may_rescue = tried.facts.options.retry_on_worker_death
        arms = {baseline: Arm(), candidate: Arm(rescue=rescue if may_rescue else None)}
        self._beside(entry).arms = arms
        return arms

    def arm_rows(self) -> list[tuple[tuple[str, ...], int]]:
        """How requests have ended, by model, version, arm (`baseline` or `candidate`) and how."""
        rows: list[tuple[tuple[str, ...], int]] = []
        for model, entry in self._versions.models.items():
            arms = entry.beside.arms if entry.beside is not None else {}
            for arm, (version, counts) in zip(("baseline", "candidate"), arms.items(), strict=False):
                rows += [((model, version, arm, how), count) for how, count in counts.ended.items()]
        return rows

    def _serving(self, model: str, baseline: str, candidate: str) -> Version:
        """The version that answers in the candidate's place now: the baseline, found by name as it may have been
        swapped; if it is not listed any more, the default version. Raises ModelNotFound, and NoWorker if that is the
        candidate itself.
        """
        entry = self._versions.model(model)
        found = entry.versions.get(baseline, entry.versions[entry.default])
        if found.name == candidate:
            raise NoWorker(model)
        return found

    def unwatch(self, model: str) -> None:
        """Stop counting; does nothing for an unknown model."""
        entry = self._versions.models.get(model)
        if entry is not None and entry.beside is not None:
            entry.beside.arms = {}
            self._tidy(entry)

    def hand_over(self, model: str, giver: str, taker: str) -> int:
        """Move the requests that wait for `giver` and did not name it to `taker`; returns how many.

        Raises ModelNotFound, VersionNotFound.
        """
        entry = self._versions.model(model)
        given, taken = entry.find(giver), entry.find(taker)
        now = time.monotonic()
        given.pool.metrics.note("rollback", now, f"version {giver} gives its requests back to {taker}")
        return given.pool.hand_over(taken.pool, lambda receiver: _rename(receiver, taken.header))

    def default_of(self, model: str) -> str:
        """The version that answers requests that name none while no weights are set. Raises ModelNotFound."""
        return self._versions.model(model).default

    def pool_of(self, model: str, version: str) -> Pool | None:
        """The pool of a version as it is registered now, else None; two versions of one name have different pools."""
        found = self._versions.get(model, version)
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
        found = self._versions.get(model, version)
        return found is not None and self._versions.models[model].share_of(found) > 0


def _rename(receiver: Receiver, header: tuple[str, str]) -> None:
    """Name the version that gives the answer, in each named receiver between the pool and the client."""
    inner: Any = receiver
    while inner is not None:
        if isinstance(inner, NamedReceiver):
            inner.rename(header)
        inner = getattr(inner, "receiver", None)
