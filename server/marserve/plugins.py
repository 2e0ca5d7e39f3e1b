"""What Python packages may add to a server, and how they are found: endpoints, metrics, a place for snapshots, notices.

A package declares entry points (`pyproject.toml`, `[project.entry-points]`) of four groups:

    marserve.endpoints    a callable without parameters, often a class, that gives an `Endpoint`
    marserve.collectors   the same for a `MetricsCollector`
    marserve.snapshots    the same for a `SnapshotStore`
    marserve.preemption   the same for a `PreemptionNotice`

The code of an installed package runs in the server. Knows no server: `app` builds the parts that use these.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, Protocol

from marserve.errors import BadSettings

__all__ = [
    "COLLECTORS",
    "ENDPOINTS",
    "PREEMPTION",
    "SNAPSHOTS",
    "Endpoint",
    "EndpointAnswer",
    "EndpointCall",
    "InstalledCollector",
    "InstalledEndpoint",
    "MetricsCollector",
    "Models",
    "PreemptionNotice",
    "SnapshotStore",
    "find_collectors",
    "find_endpoints",
    "find_preemption_notices",
    "find_snapshot_store",
]

ENDPOINTS = "marserve.endpoints"
COLLECTORS = "marserve.collectors"
SNAPSHOTS = "marserve.snapshots"
PREEMPTION = "marserve.preemption"

Listener = Literal["inference", "management"]
EndpointAccess = Literal["open", "inference", "management"]

_PATTERN = re.compile(r"[A-Za-z0-9._~-]{1,100}")


class Models(Protocol):
    """What an endpoint may ask about the models."""

    def names(self) -> list[str]:
        """All registered models."""

    def describe(self, model: str, version: str | None = None) -> dict[str, Any]:
        """What the management API says of a version (the default one). Raises an error that is answered as 404."""

    def is_ready(self, model: str, version: str | None = None) -> bool:
        """Whether a version (the default one) can be asked. Raises as `describe`."""


@dataclass(frozen=True, slots=True)
class EndpointCall:
    """One request to an endpoint. `path` is all of it, `headers` have names in lower case, `body` is whole."""

    method: str
    path: str
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]
    body: bytes
    models: Models


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """What an endpoint answers."""

    body: bytes | str = b""
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


class Endpoint(Protocol):
    """A route of its own: `/{pattern}` and all below it, for GET, PUT, POST and DELETE.

    `listener` says which address serves it, `access` which key it needs if tokens are on (`open`: none). If both
    addresses are one listener, it is served once.
    """

    pattern: str
    listener: Listener
    access: EndpointAccess

    def answer(self, call: EndpointCall) -> Awaitable[EndpointAnswer] | EndpointAnswer:
        """Answer one request. A coroutine runs on the server's event loop and must not block it; a plain function
        runs in a thread. An exception is logged, and answered with 500.
        """


class MetricsCollector(Protocol):
    """Metrics of one's own on the metrics page: a collector of prometheus_client, or one of its registries."""

    def collect(self) -> Iterable[Any]:
        """The families as they are now, as `prometheus_client.core.Metric`.

        Called for a page, in a thread, about once a second and never twice at once; it may block. What it raises is
        logged once. The page is written without it then, and where it takes longer than a second.
        """


class SnapshotStore(Protocol):
    """A place for snapshots instead of `logs/config`. `where` names it in the log.

    A name sorts by time: `20260131134453034-snapshot.cfg`. Both methods block, and raise OSError when they cannot.
    """

    where: str

    def save(self, name: str, text: bytes) -> None:
        """Keep a snapshot, whole or not at all. Raises FileExistsError for a name that is taken."""

    def newest(self) -> tuple[str, bytes] | None:
        """The snapshot with the latest name, and that name; None without a snapshot."""


class PreemptionNotice(Protocol):
    """Whether this machine will be taken away, as a cloud's metadata address says. `where` names it in the log."""

    where: str

    def notice(self) -> str | None:
        """What was announced, in a few words; None while nothing was. Called every `preemption_interval` seconds in a
        thread of its own. It may block; an exception is logged, and it is called again.
        """


@dataclass(frozen=True, slots=True)
class InstalledEndpoint:
    """An endpoint, and its origin: the entry point's name and its distribution."""

    endpoint: Endpoint
    origin: str


@dataclass(frozen=True, slots=True)
class InstalledCollector:
    """A collector, the name of its entry point, and its origin: the entry point's name and its distribution."""

    name: str
    collector: MetricsCollector
    origin: str


def find_collectors() -> list[InstalledCollector]:
    """All collectors of installed packages, in order of their entry points' names.

    Raises BadSettings for one that cannot be loaded or is not a `MetricsCollector`.
    """
    found: list[InstalledCollector] = []
    for point in _points(COLLECTORS):
        made = _make(point)
        if not _can(made, ("collect",)):
            raise BadSettings(f"{_origin(point)} collects no metrics: it needs a method collect")
        found.append(InstalledCollector(point.name, made, _origin(point)))
    return found


def find_endpoints() -> list[InstalledEndpoint]:
    """All endpoints of installed packages, in order of their entry points' names.

    Raises BadSettings for one that cannot be loaded or is not an `Endpoint`, and for two with the same pattern on one
    listener.
    """
    found: list[InstalledEndpoint] = []
    for point in _points(ENDPOINTS):
        endpoint = _make(point)
        _check_endpoint(endpoint, point)
        for other in found:
            if (other.endpoint.pattern, other.endpoint.listener) == (endpoint.pattern, endpoint.listener):
                raise BadSettings(
                    f"{_origin(point)} and {other.origin} both answer /{endpoint.pattern} on the {endpoint.listener} "
                    "listener; uninstall one of the two"
                )
        found.append(InstalledEndpoint(endpoint, _origin(point)))
    return found


def find_snapshot_store() -> SnapshotStore | None:
    """The place for snapshots of an installed package; None without such a package.

    Raises BadSettings for one that cannot be loaded or is not a `SnapshotStore`, and for several.
    """
    points = _points(SNAPSHOTS)
    if not points:
        return None
    if len(points) > 1:
        named = " and ".join(map(_origin, points))
        raise BadSettings(f"{named} all want to keep the snapshots; uninstall all but one, or start with --ncs")
    made = _make(points[0])
    if not isinstance(getattr(made, "where", None), str) or not _can(made, ("save", "newest")):
        raise BadSettings(f"{_origin(points[0])} is no place for snapshots: it needs where, save and newest")
    store: SnapshotStore = made
    return store


def find_preemption_notices() -> list[PreemptionNotice]:
    """The notices of installed packages that this machine goes, in order of their entry points' names.

    Raises BadSettings for one that cannot be loaded or is not a `PreemptionNotice`.
    """
    found: list[PreemptionNotice] = []
    for point in _points(PREEMPTION):
        made = _make(point)
        if not isinstance(getattr(made, "where", None), str) or not _can(made, ("notice",)):
            raise BadSettings(f"{_origin(point)} gives no notice that the machine goes: it needs where and notice")
        found.append(made)
    return found


def _points(group: str) -> list[EntryPoint]:
    # A distribution may be found twice, in a folder and in an overlay of it: the first one counts, as for imports.
    by_identity: dict[tuple[str, str], EntryPoint] = {}
    for point in (each for each in _installed(_state_of_path()) if each.group == group):
        by_identity.setdefault((_distribution(point), point.name), point)
    return sorted(by_identity.values(), key=lambda point: (point.name, _distribution(point)))


def _state_of_path() -> tuple[tuple[str, int], ...]:
    """The folders of imports, and when a distribution was last installed into each or removed, in nanoseconds."""
    state = []
    for folder in sys.path:
        with contextlib.suppress(OSError):
            state.append((folder, os.stat(folder or ".").st_mtime_ns))
    return tuple(state)


@lru_cache(maxsize=1)
def _installed(state: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """What is installed for these groups, found at once: looking through all distributions takes 15 ms each time."""
    points = entry_points()
    return tuple(
        point for group in (ENDPOINTS, COLLECTORS, SNAPSHOTS, PREEMPTION) for point in points.select(group=group)
    )


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"


def _origin(point: EntryPoint) -> str:
    return f"the plug-in {point.name} of {_distribution(point)} ({point.value})"


def _make(point: EntryPoint) -> Any:
    try:
        return point.load()()
    except Exception as error:
        # A package may raise anything when it is loaded: the operator gets its name.
        raise BadSettings(
            f"{_origin(point)} cannot be loaded ({type(error).__name__}: {error}); mend or uninstall it"
        ) from error


def _check_endpoint(endpoint: Any, point: EntryPoint) -> None:
    wrong = None
    if not isinstance(pattern := getattr(endpoint, "pattern", None), str) or not _PATTERN.fullmatch(pattern):
        wrong = f"its pattern is {pattern!r}; it must be one segment of a path, as `reports`"
    elif (listener := getattr(endpoint, "listener", None)) not in ("inference", "management"):
        wrong = f"its listener is {listener!r}; it must be inference or management"
    elif (access := getattr(endpoint, "access", None)) not in ("open", "inference", "management"):
        wrong = f"its access is {access!r}; it must be open, inference or management"
    elif not _can(endpoint, ("answer",)):
        wrong = "it has no method answer"
    if wrong is not None:
        raise BadSettings(f"{_origin(point)} is no endpoint: {wrong}")


def _can(made: object, methods: Iterable[str]) -> bool:
    return all(callable(getattr(made, name, None)) for name in methods)
