"""The memory that a pool may use: the pool asks before it starts workers, and says when they are gone.

Memory of devices is reserved, too: from the request for a worker until that worker is started.

`memory/` implements this; the ledger is `memory/ledger.py`. Without a bound on memory `Unbounded` allows everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


# A protocol: memory lies above pools.
class Room(Protocol):
    """One version's share of the memory for models."""

    def ask(self, workers: int) -> None:
        """Reserve memory for so many workers. They may have to wait for it (`enter`).

        Raises NotEnoughMemory if it cannot be had; nothing has changed then.
        """

    def grow(self, workers: int) -> int:
        """Reserve free memory for up to so many workers. Returns how many there may be."""

    def shrink(self, workers: int) -> None:
        """Give back the reservations beyond so many workers."""

    def site_for(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...] | None:
        """The devices for the next worker of a slot that is on `devices` and was placed on `home` first.

        None if all that it may use are lost (`why_none`), so that it has to wait.
        """

    def why_none(self) -> str:
        """Which devices of the version take no worker, and why, as a part of a sentence; empty if all do."""

    async def find_site(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...]:
        """As `site_for`, but waits; the worker's reservation moves along."""

    async def enter(self, devices: Sequence[int]) -> None:
        """Wait until there is memory for a worker on these devices, and in the host for the reserved workers.

        Raises NoMemoryNow when that takes too long.
        """

    def place(self) -> tuple[int, ...] | None:
        """The devices that are reserved for the next worker; None without a reservation."""

    def begin(self, key: str, devices: Sequence[int]) -> None:
        """The worker `key` is about to be started on these devices. Raises NotEnoughMemory if it cannot fit."""

    def fits_beside(self, devices: Sequence[int]) -> bool:
        """Whether one more worker fits on these devices, beside those that are there."""

    def loaded_on_device(self, key: str, reserved_bytes: int) -> None:
        """The worker `key` has loaded the model and took at most so many bytes of each of its devices; 0: unknown."""

    def peaked_on_device(self, reserved_bytes: int) -> None:
        """A batch that was larger than any before has raised a worker's peak on each of its devices to so much."""

    def ended_on_device(self, key: str) -> None:
        """The process of the worker `key` has ended, or was never begun."""

    def loaded(self) -> None:
        """A worker has loaded the model."""

    def emptied(self) -> None:
        """Workers, or the template, have ended."""

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """The version serves no requests: `give_up` may be called to free its memory. None: it serves again."""

    def close(self) -> None:
        """The pool has ended and has no process any more."""

    @property
    def held_bytes(self) -> int | None:
        """How much the version's processes hold, None if memory has no bound."""

    @property
    def described(self) -> Mapping[str, Any]:
        """Members for describe."""


class WithoutDevices:
    """Reserves nothing of devices: their memory has no bound here."""

    def site_for(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...] | None:
        """The devices that it has."""
        return tuple(devices)

    def why_none(self) -> str:
        """No device is known to be lost."""
        return ""

    async def find_site(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...]:
        """The devices that it has."""
        return tuple(devices)

    def place(self) -> tuple[int, ...] | None:
        """None: nothing is reserved."""
        return None

    def begin(self, key: str, devices: Sequence[int]) -> None:
        """Does nothing."""

    def fits_beside(self, devices: Sequence[int]) -> bool:
        """True."""
        return True

    def loaded_on_device(self, key: str, reserved_bytes: int) -> None:
        """Does nothing."""

    def peaked_on_device(self, reserved_bytes: int) -> None:
        """Does nothing."""

    def ended_on_device(self, key: str) -> None:
        """Does nothing."""


class Unbounded(WithoutDevices):
    """Reserves nothing: memory has no bound here."""

    held_bytes: int | None = None

    def ask(self, workers: int) -> None:
        """Does nothing."""

    def grow(self, workers: int) -> int:
        """All of them."""
        return workers

    def shrink(self, workers: int) -> None:
        """Does nothing."""

    async def enter(self, devices: Sequence[int]) -> None:
        """Does not wait."""

    def loaded(self) -> None:
        """Does nothing."""

    def emptied(self) -> None:
        """Does nothing."""

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    @property
    def described(self) -> Mapping[str, Any]:
        """Nothing."""
        return {}
