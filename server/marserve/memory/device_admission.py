"""Decides whether a worker fits on a device. Pure: it reads no memory; whoever does brings the figures.

What is free on a device is what the driver says, less what was promised to workers that have not taken it yet. A worker
that is loading has taken some of its promise already, which nobody can tell from what others took; so while any is
loading, what could be had is counted in two ways, of which neither promises too much, and the larger counts:

    free now, less the whole promises of those that are loading
    free when the first of them began, less all promises since; never more than what is free now

When nobody is loading any more, what is free counts as it is. (Programs that are not of this server may take memory
while one is loading: the load then fails, and is tried again.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from marserve.memory.admission import MIB

Source = Literal["declared", "learned", "estimated"]

# What a process takes on a device before its weights: the context, and the kernels of the runtime's libraries.
CONTEXT_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """What a worker takes on each of its devices, in bytes, and how that is known."""

    size: int
    source: Source


def device_need(
    *, declared_bytes: int | None, learned_bytes: int | None, weight_bytes: int, devices_per_worker: int
) -> DeviceNeed:
    """What a worker takes on each of its devices, as far as is known before it is loaded."""
    if declared_bytes is not None:
        return DeviceNeed(declared_bytes, "declared")
    if learned_bytes is not None:
        return DeviceNeed(learned_bytes, "learned")
    return DeviceNeed(weight_bytes // max(1, devices_per_worker) + CONTEXT_BYTES, "estimated")


@dataclass(slots=True, eq=False)
class Promise:
    """What was promised to one worker on one device. `loaded_at` is when it had its model loaded, None before."""

    label: str
    device: int
    size: int
    loaded_at: float | None = None


@dataclass(slots=True)
class _Page:
    """One device: all living promises, and those since the first of the loads that are under way began."""

    promises: list[Promise] = field(default_factory=list)
    since: list[Promise] = field(default_factory=list)
    free_before: int = 0


class DeviceBooks:
    """The promises of one server. Who asks brings free memory and the time of its reading, in bytes and seconds."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}

    def could_be_had(self, device: int, free_bytes: int, read_at: float) -> int:
        """What one more worker could be promised on this device."""
        return max(0, self.margin(device, free_bytes, read_at))

    def margin(self, device: int, free_bytes: int, read_at: float, before: Promise | None = None) -> int:
        """As `could_be_had`, but below 0 where more is promised than there is.

        With `before` what that promise may count on, which waits for its memory: only those count that came before it.
        """
        page = self._settled(device, read_at)
        if not page.since:
            return free_bytes
        first = page.since[: page.since.index(before)] if before in page.since else page.since
        living = [promise for promise in first if promise in page.promises]
        loading = sum(promise.size for promise in living if not _is_seen(promise, read_at))
        since = page.free_before - sum(promise.size for promise in living)
        return max(free_bytes - loading, min(free_bytes, since))

    def promise(self, label: str, device: int, size: int, free_bytes: int, read_at: float) -> Promise:
        """Promise a worker its memory, whether it is there or not: whoever is sure asked before."""
        page = self._settled(device, read_at)
        if not page.since:
            page.free_before = free_bytes
        promise = Promise(label, device, size)
        page.promises.append(promise)
        page.since.append(promise)
        return promise

    def loaded(self, promise: Promise, now: float) -> None:
        """The worker has its model loaded: from the next reading on what it took is no longer free."""
        promise.loaded_at = now

    def end(self, promise: Promise) -> None:
        """The worker has ended, or never began."""
        page = self._pages.get(promise.device)
        if page is not None and promise in page.promises:
            page.promises.remove(promise)
            page.since = [other for other in page.since if other is not promise]

    def count(self, device: int) -> int:
        """How many workers have promises on a device."""
        return len(self._pages.get(device, _Page()).promises)

    def holders(self, device: int) -> list[tuple[str, int]]:
        """Who has promises on a device, with how much in all, largest first."""
        held: dict[str, int] = {}
        for promise in self._pages.get(device, _Page()).promises:
            held[promise.label] = held.get(promise.label, 0) + promise.size
        return sorted(held.items(), key=lambda holder: -holder[1])

    def _settled(self, device: int, read_at: float) -> _Page:
        """The device's page; if all loads are over and seen, what is free counts from now on as it is."""
        page = self._pages.setdefault(device, _Page())
        if all(_is_seen(promise, read_at) for promise in page.since):
            page.since = []
        return page


def _is_seen(promise: Promise, read_at: float) -> bool:
    """Whether a reading was taken after the worker had taken its memory."""
    return promise.loaded_at is not None and read_at > promise.loaded_at
