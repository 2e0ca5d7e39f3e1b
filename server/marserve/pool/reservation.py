"""The memory that a pool may use: the pool asks before it starts workers, and says when they are gone.

Memory of devices is reserved, too: from the request for a worker until that worker is started.

`memory/` has the ledger, and the reservations that it bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Reservations:
    """One version's reservations of memory. These here reserve nothing: memory has no bound, and no device is lost."""

    def ask(self, workers: int) -> None:
        """Reserve memory for so many workers. They may have to wait for it (`enter`).

        Raises NotEnoughMemory if it cannot be had; nothing has changed then.
        """

    def grow(self, workers: int) -> int:
        """Reserve free memory for up to so many workers. Returns how many there may be."""
        return workers

    def shrink(self, workers: int) -> None:
        """Give back the reservations beyond so many workers."""

    def site_for(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...] | None:
        """The devices for the next worker of a slot that is on `devices` and was placed on `home` first.

        None if all that it may use are lost (`why_none`), so that it has to wait.
        """
        return tuple(devices)

    def why_none(self) -> str:
        """Which devices of the version take no worker, and why, as a part of a sentence; empty if all do."""
        return ""

    async def find_site(self, devices: Sequence[int], home: Sequence[int]) -> tuple[int, ...]:
        """As `site_for`, but waits; the worker's reservation moves along."""
        return tuple(devices)

    async def enter(self, devices: Sequence[int]) -> None:
        """Wait until there is memory for a worker on these devices, and in the host for the reserved workers.

        Raises NoMemoryNow when that takes too long.
        """

    def place(self) -> tuple[int, ...] | None:
        """The devices that are reserved for the next worker; None without a reservation."""
        return None

    def begin(self, key: str, devices: Sequence[int]) -> None:
        """The worker `key` is about to be started on these devices. Raises NotEnoughMemory if it cannot fit."""

    def fits_beside(self, devices: Sequence[int]) -> bool:
        """Whether one more worker fits on these devices, beside those that are there."""
        return True

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
        return None

    @property
    def described(self) -> Mapping[str, Any]:
        """Members for describe."""
        return {}
