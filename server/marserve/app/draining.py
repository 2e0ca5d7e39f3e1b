"""How the server ends: who asked for it, how much time is left, and in which order.

Readiness falls, requests are answered for `drain_delay` more, new ones are refused, accepted ones are answered for at
most `drain_timeout`, listeners close, connections end. A second signal ends every wait. What runs below (pools,
workers, templates) is ended by who made it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from marserve.api.connections import ConnectionTable
from marserve.app.listeners import Listener
from marserve.app.parts import Parts
from marserve.app.tasks import wait_for_all
from marserve.registry.models import Registry
from marserve.workflows.workflows import Workflows

if TYPE_CHECKING:
    from marserve.api.grpc_listener import GrpcListener

log = logging.getLogger("marserve.app")

# After the drain, how long connections may take to send their last answers out.
CLOSE_CONNECTIONS_S = 5.0


class Stop:
    """Whether the server is to end, in a hurry, and because something failed."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.has_failed = False
        self._hurry = asyncio.Event()
        self._signals = 0

    def on_signal(self, number: int) -> None:
        """The first signal asks for the end, a second one for haste."""
        self._signals += 1
        if self._signals == 1:
            log.info("%s: draining", signal.Signals(number).name)
            self.asked.set()
        else:
            log.info("%s again: stopping now", signal.Signals(number).name)
            self._hurry.set()

    def on_crash(self, why: str) -> None:
        """A worker of a model with `onCrash: fail` crashed: end as on SIGTERM, with another exit status."""
        if not self.has_failed:
            log.error("%s; the model's onCrash is fail: the server ends", why)
        self.has_failed = True
        self.asked.set()

    async def unless_hurried(self, work: Coroutine[Any, Any, Any], limit_s: float | None = None) -> Any:
        """Wait for `work`, at most `limit_s`, unless a second signal came; None if it was not finished."""
        task = asyncio.ensure_future(work)
        hurry = asyncio.ensure_future(self._hurry.wait())
        done, _ = await asyncio.wait([task, hurry], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for other in (task, hurry):
            if not other.done():
                other.cancel()
        await asyncio.wait([task, hurry])
        return task.result() if task in done else None


async def drain(
    parts: Parts, stop: Stop, listeners: Sequence[Listener], grpc_listeners: Sequence[GrpcListener]
) -> None:
    """Answer what was accepted, refuse what comes; a second signal ends the wait."""
    settings, registry = parts.settings, parts.registry
    registry.begin_drain()
    await parts.rollouts.stop()  # before anything ends: that would be no verdict on a version
    await stop.unless_hurried(asyncio.sleep(settings.drain_delay))
    registry.refuse_new()
    given_up = await stop.unless_hurried(finish_accepted(registry, parts.workflows, settings.drain_timeout))
    if given_up:
        log.warning("%d requests were given up: they were not answered within drain_timeout", given_up)
    await asyncio.gather(*(listener.turn_away() for listener in listeners))
    for listener in listeners:
        listener.close()
        for connection in list(listener.state.connections):
            connection.shutdown()
    closing = [listener.stop(CLOSE_CONNECTIONS_S) for listener in grpc_listeners]
    closing.append(_wait_for_connections(parts.connections))
    await stop.unless_hurried(wait_for_all(closing), CLOSE_CONNECTIONS_S)


async def finish_accepted(registry: Registry, workflows: Workflows, timeout_s: float) -> int:
    """Wait for what was accepted; returns how many requests are left. Workflows first: their nodes are models."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    workflows.refuse_new()
    left = await workflows.drain(timeout_s)
    return left + await registry.drain(max(0.0, end - loop.time()))


async def _wait_for_connections(connections: ConnectionTable) -> None:
    while len(connections):
        await asyncio.sleep(0.01)
