"""Where others take part in the life of a version: what is asked before its pool is made, and who is told what of it.

`app` and the registry's own parts add to these lists before the server starts; the registry calls them, in order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from marserve.registry.plan import Plan
from marserve.registry.versions import Version


@dataclass(slots=True)
class Hooks:
    """The lists; all of them empty is a registry by itself.

    `before_pool` may wait, and may raise a MarserveError: then no pool is made, and nothing of the version is left.
    `after_ready` is called when the first load of a version, or one that a scale asked for, has ended well.
    `after_left` is called when the last process of a version has ended, before its folder is deleted. Neither may
    raise or wait.
    """

    before_pool: list[Callable[[Plan], Awaitable[None]]] = field(default_factory=list)
    after_ready: list[Callable[[Version], None]] = field(default_factory=list)
    after_left: list[Callable[[Version], None]] = field(default_factory=list)
