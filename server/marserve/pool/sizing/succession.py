"""Replaces a worker that has served long enough; its replacement loads first, so that no request notices.

A second slot of the same id loads the model. When its worker takes batches it takes the first slot's place; the old
worker is given nothing more, ends its batches, and ends. One worker of a pool is replaced at a time, so the version
needs memory for one worker more. A replacement that cannot load changes nothing; it is tried again after a while.

Without memory for one worker more, the old worker ends before its replacement is started, and requests wait that long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from marserve.pool.changes import Changes
from marserve.pool.reservation import Reservations
from marserve.pool.slots.slot import Slot
from marserve.pool.slots.slots import Slots

log = logging.getLogger("marserve.pool")

TRY_AGAIN_S = 30.0


class Succession:
    """The replacements of one pool's workers."""

    def __init__(
        self, reservations: Reservations, slots: Slots, changes: Changes, slot_changed: Callable[[], None]
    ) -> None:
        self._reservations, self._slots, self._changes = reservations, slots, changes
        self._slot_changed = slot_changed
        self._task: asyncio.Task[None] | None = None
        self._not_before = 0.0
        self._is_over = False

    def begin(self, slot: Slot, reason: str) -> None:
        """Begin to replace a slot's worker. Ignored while another replacement is under way or one failed lately."""
        if self._task is not None or self._is_over or slot.is_retired or slot not in self._slots.placed:
            return
        if time.monotonic() < self._not_before:
            return
        self._task = asyncio.create_task(self._replace(slot, reason))
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """Replace no worker any more; a replacement that is loading is ended."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a worker could not be replaced", exc_info=error)
        if not self._is_over:
            self._slot_changed()  # the next one may be due

    async def _replace(self, slot: Slot, reason: str) -> None:
        reservations, workers = self._reservations, len(self._slots.placed)
        has_room = reservations.grow(workers + 1) > workers
        site = reservations.site_for(slot.uses, slot.home) or slot.uses
        if has_room and not reservations.fits_beside(site):
            reservations.shrink(workers)
            has_room = False
        if not has_room:
            await self._replace_in_place(slot, reason)
            return
        try:
            await self._replace_beside(slot, reason)
        finally:
            reservations.shrink(len(self._slots.placed))

    async def _replace_in_place(self, slot: Slot, reason: str) -> None:
        log.info(
            "%s is replaced (%s); it goes first, for there is no memory for its replacement beside it",
            slot.name,
            reason,
        )
        heir = slot.successor()
        self._slots.replace(slot, heir, reason)
        await slot.wait_until_gone()
        if not heir.is_retired:
            heir.start()

    async def _replace_beside(self, slot: Slot, reason: str) -> None:
        log.info("%s is replaced (%s); its replacement is being started", slot.name, reason)
        heir, slots = slot.successor(), self._slots
        heir.start()
        try:
            while not heir.is_ready and not heir.load_failures and slot in slots.placed and not slot.is_retired:
                await self._changes.wait()
        except BaseException:
            slots.dismiss(heir, at_once=True)
            raise
        if not heir.is_ready or slot not in slots.placed:
            if heir.load_failures:
                why = heir.last_death.detail if heir.last_death is not None else "it did not load"
                log.warning("%s keeps its worker: a replacement could not be started: %s", slot.name, why)
                self._not_before = time.monotonic() + TRY_AGAIN_S
            slots.dismiss(heir, at_once=True)
            return
        self._slots.replace(slot, heir, reason)
