"""What a registry has, as plain data to compare a desired state with. Values are under the document's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from marserve.archive.model_config import KEYS
from marserve.registry.calls import RegistryOptions
from marserve.registry.plan import declared_options
from marserve.registry.versions import Version

_CONFIG_NAMES = frozenset(key.name for key in KEYS)


@dataclass(frozen=True, slots=True)
class ActualVersion:
    """A version that the server has.

    `declared` is what a document said of it when it was loaded or last changed; None of one that came by a call.
    `source` is what it was registered with; `config` holds what is in force now. `base` is what would be of the number
    of workers and of the forming of batches if no document said anything: the archive's word, and the server's.
    `most_workers`: there are devices for no more, 0 for no such bound.
    """

    source: str
    workers: tuple[int, int]
    config: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    declared: Mapping[str, Any] | None = None
    handler: str | None = None
    runtime: str | None = None
    most_workers: int = 0


@dataclass(frozen=True, slots=True)
class ActualModel:
    """A model that the server has. `traffic` and `shadow` as their calls give them, None for none."""

    versions: Mapping[str, ActualVersion]
    default: str
    labels: Mapping[str, str] = field(default_factory=dict)
    traffic: Mapping[str, Any] | None = None
    shadow: Mapping[str, Any] | None = None


ActualState = Mapping[str, ActualModel]


def look_at(version: Version, options: RegistryOptions) -> ActualVersion:
    """One version as it is now."""
    facts, pool = version.facts, version.pool.options
    archive = version.plan.unpacked.config.document or {}
    config = {
        **{key: value for key, value in archive.items() if key in _CONFIG_NAMES},
        "minWorkers": version.min_workers,
        "maxWorkers": version.max_workers,
        "batchSize": pool.batch_size,
        "maxBatchDelay": round(pool.max_batch_delay_s * 1000),
        "responseTimeout": _whole(facts.options.response_timeout_s),
        "startupTimeout": _whole(facts.options.startup_timeout_s),
    }
    base: dict[str, Any] = {}
    if facts.declared is not None:
        plain = declared_options(version.plan, {}, options)
        base = {
            "minWorkers": plain.min_workers,
            "maxWorkers": plain.max_workers,
            "batchSize": plain.batch_size,
            "maxBatchDelay": round(plain.max_batch_delay_s * 1000),
        }
    return ActualVersion(
        source=facts.url,
        workers=(version.min_workers, version.max_workers),
        config=config,
        base=base,
        declared=facts.declared,
        handler=version.plan.load.handler,
        runtime=facts.runtime,
        most_workers=facts.options.most_workers,
    )


def _whole(seconds: float) -> int | float:
    return int(seconds) if seconds == int(seconds) else seconds
