"""The registered models as plain data, for comparison with a desired state. Values have the document's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ActualVersion:
    """A registered version.

    `declared` is what a document said of it when it was loaded or last changed; None for a version that came by a call.
    `source` is the URL or name that it was registered with; `config` holds the values in force. `base` holds the
    numbers of workers and the batch options that would be in force if the document did not mention them: what calls
    left, else the archive's, else the server's.
    `most_workers` is the bound by the number of devices, 0 without one. `is_on_demand`: requests wake its workers, so
    their lower bound is 0. `has_weights_beside`: its weights lie apart from its archive, where others may be by now.
    `as_declared` is what a document has to say to get exactly this version.
    """

    source: str
    workers: tuple[int, int]
    config: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    declared: Mapping[str, Any] | None = None
    handler: str | None = None
    runtime: str | None = None
    most_workers: int = 0
    is_on_demand: bool = False
    has_weights_beside: bool = False
    as_declared: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ActualModel:
    """A registered model. `traffic` and `shadow` are in the shape of their calls, None without one."""

    versions: Mapping[str, ActualVersion]
    default: str
    labels: Mapping[str, str] = field(default_factory=dict)
    traffic: Mapping[str, Any] | None = None
    shadow: Mapping[str, Any] | None = None


ActualState = Mapping[str, ActualModel]
