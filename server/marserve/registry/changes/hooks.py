"""Hooks into the life of a version: calls before its pool is made, when it is ready, and when it has ended.

`app` and the registry's own parts add hooks before the server starts; the registry calls them in order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.plan import Plan
from marserve.registry.catalogue.versions import Version


class Foresee(Protocol):
    """A memory ledger's estimate for dry runs; see `Hooks`."""

    def __call__(
        self, options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None, /
    ) -> Mapping[str, Any]:
        """What `workers` workers would take, in bytes. Raises NotEnoughMemory."""


@dataclass(slots=True)
class Hooks:
    """The hooks of one registry; without any the registry works by itself.

    `before_pool` may wait, and may raise a MarserveError: then no pool is made, and nothing of the version is left.
    `memory` and `device_memory` are called by dry runs. Their arguments are a version's options, its workers now (None:
    it is not registered), its workers then, and the options of a version that would end before, if any. Each returns
    what is known, in bytes, and raises NotEnoughMemory if the workers do not fit. It changes nothing.
    Each of `uses_archive` gets a name in the store, and says whether a version off the list may need that file again.
    `after_ready` is called when the first load of a version, or the load after a scale, has ended well.
    `after_left` is called when the last process of a version has ended, before its folder is deleted. Neither may
    raise or wait.
    """

    memory: Foresee = lambda options, before, workers, leaving=None: {}
    device_memory: Foresee = lambda options, before, workers, leaving=None: {}
    before_pool: list[Callable[[Plan], Awaitable[None]]] = field(default_factory=list)
    uses_archive: list[Callable[[str], bool]] = field(default_factory=list)
    after_ready: list[Callable[[Version], None]] = field(default_factory=list)
    after_left: list[Callable[[Version], None]] = field(default_factory=list)
