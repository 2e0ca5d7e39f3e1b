"""Where others take part in the life of a version: what is asked before its pool is made, and who is told what of it.

`app` and the registry's own parts add to these lists before the server starts; the registry calls them, in order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from marserve.pool.options import PoolOptions
from marserve.registry.catalogue.plan import Plan
from marserve.registry.catalogue.versions import Version


class Foresee(Protocol):
    """Whoever counts memory; see `Hooks`."""

    def __call__(
        self, options: PoolOptions, before: int | None, workers: int, leaving: PoolOptions | None = None, /
    ) -> Mapping[str, Any]:
        """What so many workers would take, in bytes. Raises NotEnoughMemory."""


@dataclass(slots=True)
class Hooks:
    """The lists; all of them empty is a registry by itself.

    `before_pool` may wait, and may raise a MarserveError: then no pool is made, and nothing of the version is left.
    `memory` and `device_memory` are asked by dry runs, with a version's options, the workers that it has (None: it is
    not there) and those that it would have, and the options of one that would have gone before, if any: each gives what
    is known, in bytes, and raises NotEnoughMemory where they have no room. It changes nothing.
    `uses_archive` say of a name in the store whether a version that is not on the list may want its file again.
    `after_ready` is called when the first load of a version, or one that a scale asked for, has ended well.
    `after_left` is called when the last process of a version has ended, before its folder is deleted. Neither may
    raise or wait.
    """

    memory: Foresee = lambda options, before, workers, leaving=None: {}
    device_memory: Foresee = lambda options, before, workers, leaving=None: {}
    before_pool: list[Callable[[Plan], Awaitable[None]]] = field(default_factory=list)
    uses_archive: list[Callable[[str], bool]] = field(default_factory=list)
    after_ready: list[Callable[[Version], None]] = field(default_factory=list)
    after_left: list[Callable[[Version], None]] = field(default_factory=list)
