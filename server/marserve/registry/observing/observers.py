"""The observers of a model's requests: a shadow that mirrors some of them, and the arms of a roll-out.

Most models have neither, and `Registry.submit` then skips this module. Observers get an answer after the client.
"""

from __future__ import annotations

from marserve.messages import Accepted, Receiver, Request
from marserve.pool.pool import Pool
from marserve.registry.observing.arms import Arm
from marserve.registry.observing.shadow import Shadow


class Beside:
    """The observers of one model: its shadow and its arms."""

    __slots__ = ("arms", "shadow")

    def __init__(self) -> None:
        self.shadow: Shadow | None = None
        self.arms: dict[str, Arm] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a shadow nor an arm."""
        return self.shadow is None and not self.arms

    def notice(self) -> None:
        """Follow a change of the model's versions or traffic."""
        if self.shadow is not None:
            self.shadow.look_at_traffic()

    def submit(self, pool: Pool, version: str, *, is_asked: bool, request: Request, receiver: Receiver) -> Accepted:
        """Hand a request to the pool of the version that was chosen for it; `is_asked`: the client named it.

        Raises as the pool.
        """
        shadow = self.shadow
        if shadow is not None and shadow.spec.version != version:
            receiver = shadow.follow(request, receiver)
        arm = None if is_asked else self.arms.get(version)
        return pool.submit(request, receiver) if arm is None else arm.submit(pool, request, receiver)
