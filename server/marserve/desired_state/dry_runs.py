"""The dry runs of the calls that register, scale, tune, unregister and set the default, as surfaces answer them.

The registry says what would change. This module adds the refusal of calls while a desired state decides, and notes
about roll-outs.
"""

from __future__ import annotations

from dataclasses import replace

from marserve.desired_state.policies import Changes
from marserve.registry.changes.dry_run import Rehearsed
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.models import Registry
from marserve.rollout.rollouts import Rollouts


class DryRuns:
    """Each method raises what the call itself would raise, as far as that can be foreseen."""

    def __init__(self, registry: Registry, changes: Changes, rollouts: Rollouts | None = None) -> None:
        self._registry = registry
        self._changes = changes
        self._rollouts = rollouts

    async def register(self, parameters: RegisterParameters) -> Rehearsed:
        """See `Registry.register`."""
        notes = self._changes.vet("register a model")
        if self._changes.takes_what_is_there:
            parameters = replace(parameters, freshness="now")
        return (await self._registry.rehearsal.register(parameters)).noting(*notes)

    def scale(self, model: str, version: str | None, *, min_workers: int, max_workers: int) -> Rehearsed:
        """See `Registry.scale`."""
        notes = self._changes.vet("scale a model")
        rehearsed = self._registry.rehearsal.scale(model, version, min_workers=min_workers, max_workers=max_workers)
        return rehearsed.noting(*notes)

    def tune(
        self, model: str, version: str | None, *, batch_size: int | None, max_batch_delay_s: float | None
    ) -> Rehearsed:
        """See `Registry.tune`."""
        notes = self._changes.vet("change batches")
        rehearsal = self._registry.rehearsal
        rehearsed = rehearsal.tune(model, version, batch_size=batch_size, max_batch_delay_s=max_batch_delay_s)
        return rehearsed.noting(*notes)

    def unregister(self, model: str, version: str | None = None, *, force: bool = False) -> Rehearsed:
        """See `Registry.unregister`."""
        notes = self._changes.vet("unregister a model")
        if not force:
            self._registry.check_is_no_node(model, version)
        rehearsed = self._registry.rehearsal.unregister(model, version, force=force)
        under_way = self._under_way(model)
        if under_way is not None and rehearsed.version in under_way:
            notes.append(
                f"the roll-out of version {under_way[0]} would be aborted, for it needs version {rehearsed.version}"
            )
        return rehearsed.noting(*notes)

    def set_default(self, model: str, version: str) -> Rehearsed:
        """See `Registry.set_default`."""
        notes = self._changes.vet("set the default version")
        rehearsed = self._registry.rehearsal.set_default(model, version)
        if (under_way := self._under_way(model)) is not None:
            notes.append(f"the roll-out of version {under_way[0]} goes on, and makes it the default if it is promoted")
        return rehearsed.noting(*notes)

    def _under_way(self, model: str) -> tuple[str, str] | None:
        return None if self._rollouts is None else self._rollouts.under_way(model)
