"""Reads what a registered version is now, for comparison with a desired state, and notes what a document says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from marserve.errors import MarserveError
from marserve.model_options import DECLARABLE, IN_FORCE, IN_PLACE, written
from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.versions import Version
from marserve.registry.changes.actual import ActualVersion
from marserve.registry.intake.effective_options import effective_runtime
from marserve.registry.intake.plan import declared_options
from marserve.registry.intake.registration import RegistryOptions
from marserve.settings.values import ModelDefaults
from marserve.store.addresses.pinned_digest import split_digest


def look_at(version: Version, options: RegistryOptions) -> ActualVersion:
    """One version as it is now."""
    facts = version.facts
    archive = version.plan.unpacked.config.document or {}
    now = written(version.options, *IN_FORCE)
    asked = written(facts.asked)
    level = facts.options.parallel_level if facts.config.parallel is None else 0
    if level and level != facts.config.parallel_level:
        asked["parallelLevel"] = level  # from a snapshot
    config = {**{key: value for key, value in archive.items() if key in DECLARABLE}, **asked, **now}
    base = _undeclared(version, options)
    unsaid = {**base, **facts.left_by_calls} if base else {}
    weights = version.plan.unpacked.checkpoint
    return ActualVersion(
        source=facts.url,
        workers=(version.min_workers, version.max_workers),
        config=config,
        base={key: unsaid[key] for key in IN_PLACE} if facts.declared is not None and unsaid else {},
        declared=facts.declared,
        handler=version.plan.load.handler,
        runtime=facts.runtime,
        most_workers=facts.options.most_workers,
        is_on_demand=_is_on_demand(facts.options),
        has_weights_beside=weights is not None and weights.is_beside,
        as_declared=_as_declared(version, options, {**asked, **now}, base),
    )


def declare(version: Version, declared: Mapping[str, Any] | None) -> None:
    """Note what a document says of a version that it leaves as it is; None: no document names it any more.

    For a version that came by a call, values that the document does not mention are noted too, so that applying the
    document again changes nothing.
    """
    facts = version.facts
    left = facts.left_by_calls if declared is not None else {}
    if facts.declared is None and declared is not None:
        left = {key: value for key, value in written(version.options, *IN_PLACE).items() if key not in declared}
    version.facts = replace(facts, declared=declared, left_by_calls=left)


def _undeclared(version: Version, options: RegistryOptions) -> dict[str, Any]:
    """What would be in force if a document declared the version without any configuration.

    Empty if such a version is impossible: the archive asks for devices that a snapshot or a call made unnecessary.
    """
    try:
        plain = declared_options(version.plan, {}, options)
    except MarserveError:
        return {}
    return written(plain, *IN_FORCE)


def _as_declared(
    version: Version, options: RegistryOptions, now: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
    """The version under a document's keys: what a document said of it, or its registration, and the changes since.

    The numbers of workers are always included. Values that equal the archive's or the server's are left out.
    """
    facts, plan = version.facts, version.plan
    least, most = version.min_workers, version.max_workers
    if _is_on_demand(facts.options) and not least:
        least = min(facts.options.least_awake, most)
    bounds = {"minWorkers": least, "maxWorkers": most}
    if facts.declared is not None:
        changed = {key: now[key] for key in IN_PLACE if now[key] != facts.declared.get(key, base.get(key))}
        return {**facts.declared, **changed, **bounds}
    url, sha256 = split_digest(facts.url)
    declared: dict[str, Any] = {"url": url} if sha256 is None else {"url": url, "sha256": sha256}
    if plan.load.handler != (plan.unpacked.manifest.handler or options.default_handler):
        declared["handler"] = plan.load.handler
    configured = options.models.get(version.model, {}).get(version.name, ModelDefaults())
    if facts.runtime != effective_runtime(None, configured, plan.unpacked.manifest.runtime):
        declared["runtime"] = facts.runtime
    return {**declared, **{key: value for key, value in now.items() if value != base.get(key)}, **bounds}


def _is_on_demand(options: PoolOptions) -> bool:
    return options.idle_timeout_s == math.inf
