"""The memory that a pool may use, as the pool sees it: it asks before it starts workers, and says when they are gone.

Memory of devices too: places on them are kept from the moment a worker is asked for until it is begun.

The ledger lies above (`memory/ledger.py`); without a bound there is none, and every answer is yes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


# A protocol: memory lies above pools.
class Room(Protocol):
    """One version's share of the memory for models."""

    def ask(self, workers: int) -> None:
        """Reserve memory for so many workers. They may have to wait for it (`enter`).

        Raises NotEnoughMemory where it cannot be had; nothing has changed then.
        """

    def grow(self, workers: int) -> int:
        """Reserve memory for up to so many workers, of what is free. Returns how many there may be."""

    def shrink(self, workers: int) -> None:
        """There are to be so few workers from now on."""

    def site_for(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...] | None:
        """The devices of the next worker of a slot that is at `devices` and was placed at `home` first.

        None: all that it may have are lost (`why_none`), and it has to wait.
        """

    def why_none(self) -> str:
        """Which devices of the version take no worker, and why, as a part of a sentence; empty where all do."""

    async def find_site(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...]:
        """As `site_for`, but waits; a place kept for the worker moves along."""

    async def enter(self, devices: Sequence[int]) -> None:
        """Wait until there is memory for a worker on these devices, and in the host for what was asked for.

        Raises NoMemoryNow when that takes too long.
        """

    def place(self) -> tuple[int, ...] | None:
        """The devices that are reserved for the next worker; None where none are."""

    def begin(self, key: str, devices: Sequence[int]) -> None:
        """The worker `key` is about to be started on these devices. Raises NotEnoughMemory where that is in vain."""

    def fits_beside(self, devices: Sequence[int]) -> bool:
        """Whether one more worker would fit on these devices, beside those that are there."""

    def loaded_on_device(self, key: str, reserved_bytes: int) -> None:
        """The worker `key` has its model loaded, and had taken at most so much of each of its devices; 0: unknown."""

    def peaked_on_device(self, reserved_bytes: int) -> None:
        """A worker has taken so much of each of its devices at most, since a batch that was larger than any before."""

    def ended_on_device(self, key: str) -> None:
        """The process of the worker `key` has ended, if it was begun at all."""

    def loaded(self) -> None:
        """A worker has loaded the model."""

    def emptied(self) -> None:
        """Workers, or the template, have ended."""

    def make_spare(self, give_up: Callable[[], None] | None) -> None:
        """The version serves nobody, and `give_up` begins to end it where its memory is wanted; None: it serves."""

    def close(self) -> None:
        """The pool has no process any more and never will."""

    @property
    def held_bytes(self) -> int | None:
        """What the version's processes hold, None where memory has no bound."""

    @property
    def described(self) -> Mapping[str, Any]:
        """What describe says of it."""


class WithoutDevices:
    """Reserves nothing of devices: their memory has no bound here."""

    def site_for(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...] | None:
        """Where it is."""
        return tuple(devices)

    def why_none(self) -> str:
        """No device is known to be lost."""
        return ""

    async def find_site(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...]:
        """Where it is."""
        return tuple(devices)

    def place(self) -> tuple[int, ...] | None:
        """None are reserved."""
        return None

    def begin(self, key: str, devices: Sequence[int]) -> None:
        """Does nothing."""

    def fits_beside(self, devices: Sequence[int]) -> bool:
        """Always."""
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
        """As many as there shall be."""

    def grow(self, workers: int) -> int:
        """As many as there shall be."""
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
