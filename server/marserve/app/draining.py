"""The end of a server: the request to stop, the time limits, and the order.

Readiness falls. Requests are taken for `drain_delay` more, then new ones are refused, and accepted ones are answered
for at most `drain_timeout`. The rest is refused, and the log names it. Listeners close, connections end. A second
signal ends every wait. Pools, workers and templates are ended by the stack of `building/parts.py`.
`server.py` takes the signal, and ends last.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from marserve.api.http.connections import ConnectionTable
from marserve.app.building.parts import Parts
from marserve.app.building.tasks import wait_for_all
from marserve.app.listeners import Listener
from marserve.registry.data_plane import DataPlane
from marserve.workflows.workflows import Workflows

if TYPE_CHECKING:
    from marserve.api.grpc.listener import GrpcListener

log = logging.getLogger("marserve.app")

# How long connections without an answer under way may take to end after the drain.
CLOSE_CONNECTIONS_S = 5.0
# How many refused requests the log names, for each version.
MOST_NAMED = 20


class Stop:
    """Whether the server is to end, whether in a hurry (`hurry`), and whether because something failed."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.has_failed = False
        self.first_signal: int | None = None
        self.hurry = asyncio.Event()
        self._signals = 0

    def on_signal(self, number: int) -> None:
        """Ask for the end at the first signal, and end all waits at the second."""
        self._signals += 1
        if self._signals == 1:
            self.first_signal = number
            log.info("%s: draining", signal.Signals(number).name)
            self.asked.set()
        else:
            log.info("%s again: stopping now", signal.Signals(number).name)
            self.hurry.set()

    def on_notice(self, sentence: str) -> None:
        """The machine is to go: ask for the end. A signal that follows counts as the first one and ends no waits."""
        log.warning("%s: draining", sentence)
        self.asked.set()

    def on_notice_signal(self, number: int) -> None:
        """As `on_notice`, for the signal that a setting names."""
        self.on_notice(f"{signal.Signals(number).name}: this machine is to go")

    def on_crash(self, why: str) -> None:
        """A worker of a model with `onCrash: fail` crashed: end as on SIGTERM, with another exit status."""
        if not self.has_failed:
            log.error("%s; the model's onCrash is fail: the server ends", why)
        self.has_failed = True
        self.asked.set()

    async def unless_hurried(self, work: Coroutine[Any, Any, Any], limit_s: float | None = None) -> Any:
        """Wait for `work`, at most `limit_s` and until a second signal; None if it has not ended by then."""
        task = asyncio.ensure_future(work)
        hurry = asyncio.ensure_future(self.hurry.wait())
        done, _ = await asyncio.wait([task, hurry], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for other in (task, hurry):
            if not other.done():
                other.cancel()
        await asyncio.wait([task, hurry])
        return task.result() if task in done else None


async def drain(
    parts: Parts, stop: Stop, listeners: Sequence[Listener], grpc_listeners: Sequence[GrpcListener]
) -> None:
    """Answer accepted requests, refuse new ones; a second signal ends every wait."""
    settings, registry, loop = parts.settings, parts.registry, asyncio.get_running_loop()
    registry.begin_drain()
    for listener in listeners:
        listener.send_clients_away()
    await parts.rollouts.stop()  # first, so that failures of the end count against no version
    await stop.unless_hurried(asyncio.sleep(settings.drain_delay))
    registry.refuse_new()
    if parts.uploads is not None:
        parts.uploads.stop()
    until = loop.time() + settings.drain_timeout
    # From here on gRPC's clients get a GOAWAY, as their connections would bring them back here for ever. They have a
    # little more time than the drain, so that they also get the refusals at its end.
    grace_s = settings.drain_timeout + CLOSE_CONNECTIONS_S
    leaving = asyncio.ensure_future(wait_for_all([listener.stop(grace_s) for listener in grpc_listeners]))
    try:
        left = await stop.unless_hurried(finish_accepted(registry.data_plane, parts.workflows, settings.drain_timeout))
        if left != 0:
            why = "a second signal came" if left is None else f"drain_timeout is over ({settings.drain_timeout:g} s)"
            give_up_accepted(registry.data_plane, parts.workflows, why)
        parts.logs.book.end_following()
        await asyncio.gather(*(listener.turn_away() for listener in listeners))
        for listener in listeners:
            listener.close()
            for connection in list(listener.state.connections):
                connection.shutdown()
        closing = [_wait_for_connections(parts.connections, until), _wait(leaving)]
        await stop.unless_hurried(wait_for_all(closing), max(CLOSE_CONNECTIONS_S, until - loop.time()))
        if cut := parts.connections.answering:
            log.warning("%s cut off: the client had not taken its answer", _count(cut, "connection"))
    finally:
        leaving.cancel()
        await asyncio.wait([leaving])


def under_way(parts: Parts) -> int:
    """How many accepted requests are not answered. One of a workflow counts once, however many nodes it is at."""
    return max(parts.registry.data_plane.under_way, parts.workflows.under_way)


async def finish_accepted(
    data_plane: DataPlane, workflows: Workflows, timeout_s: float, now: Callable[[], float] = time.monotonic
) -> int:
    """Wait for accepted requests; returns how many are left. Workflows go first: their nodes are models."""
    end = now() + timeout_s
    workflows.refuse_new()
    left = await workflows.drain(timeout_s)
    return left + await data_plane.drain(max(0.0, end - now()))


def give_up_accepted(data_plane: DataPlane, workflows: Workflows, why: str) -> None:
    """Refuse accepted requests that are not answered, and log their names."""
    for workflow, ids in workflows.refuse_accepted():
        log.warning("Workflow %s: %s refused, %s: %s", workflow, _count(len(ids), "request"), why, _name(ids))
    for model, version, requests in data_plane.refuse_accepted():
        streams = sum(request.where == "stream" for request in requests)
        log.warning(
            "Model %s version %s: %s refused (%d waited, %d ran) and %s cut, %s: %s",
            model,
            version,
            _count(len(requests) - streams, "request"),
            sum(request.where == "waiting" for request in requests),
            sum(request.where == "running" for request in requests),
            _count(streams, "stream"),
            why,
            _name([request.request_id for request in requests]),
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _name(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return ", ".join(ids[:MOST_NAMED]) + more


async def _wait(task: asyncio.Future[Any]) -> None:
    await asyncio.wait([task])


async def _wait_for_connections(connections: ConnectionTable, until: float) -> None:
    """Wait until all have closed; after a while only, and until `until`, for those with an answer under way."""
    loop = asyncio.get_running_loop()
    patient_until = loop.time() + CLOSE_CONNECTIONS_S
    while len(connections) and (loop.time() < patient_until or (connections.answering and loop.time() < until)):
        await asyncio.sleep(0.01)
