"""The slots of one version: how many there are, those that are leaving, and the end of the template."""

from __future__ import annotations

import asyncio

from marserve.machine.devices import choose_group
from marserve.pool.slots.slot import Slot, SlotContext


class Slots:
    """The slots of one version. `placed` are those that count, oldest first; the others are leaving."""

    def __init__(self, context: SlotContext) -> None:
        self.placed: list[Slot] = []
        self._context = context
        self._leaving: dict[asyncio.Task[None], Slot] = {}
        self._dropping: set[asyncio.Task[None]] = set()

    @property
    def leaving(self) -> list[Slot]:
        """The slots that were retired and have not ended yet."""
        return list(self._leaving.values())

    @property
    def has_template(self) -> bool:
        """Whether the next worker need not load the model."""
        return bool(self._context.launcher.template_pids)

    @property
    def is_loading(self) -> bool:
        """Whether workers are being started. Those that wait for a device, or for their next try, do not count."""
        waits = [slot for slot in self.placed if slot.has_given_up or slot.next_start_at or slot.waits_for_device]
        return any(not slot.is_ready and slot not in waits for slot in self.placed)

    def resize(self, count: int) -> None:
        """Begin to have `count` slots: start what is missing, retire the last ones when their work is done."""
        while len(self.placed) < count:
            slot = self._make()
            self.placed.append(slot)
            slot.start()
        while len(self.placed) > count:
            self.dismiss(self.placed.pop(), at_once=False)
        self._context.changed()

    def replace(self, slot: Slot, heir: Slot, reason: str) -> None:
        """Put `heir` in the place of `slot`, which is retired when its work is done."""
        self.placed[self.placed.index(slot)] = heir
        self._context.metrics.worker_recycles[reason] += 1
        self.dismiss(slot, at_once=False)
        self._context.changed()

    def dismiss(self, slot: Slot, *, at_once: bool) -> None:
        """Retire a slot in the background; `wait_until_gone` waits for it."""
        slot.retire(at_once=at_once)  # not in the task: a request might come before its first step
        task = asyncio.create_task(slot.wait_until_gone())
        self._leaving[task] = slot
        task.add_done_callback(lambda task: self._leaving.pop(task, None))

    def drop_template(self) -> None:
        """Begin to end the template: the next worker has to load the model anew."""
        task = asyncio.create_task(self._context.launcher.drop_template())
        self._dropping.add(task)
        task.add_done_callback(self._dropped)

    def _dropped(self, task: asyncio.Task[None]) -> None:
        self._dropping.discard(task)
        self._context.reservations.emptied()

    async def wait_until_gone(self) -> None:
        """Wait until the slots that were retired have ended."""
        while self._leaving:
            await asyncio.wait(set(self._leaving))

    async def wait_until_asleep(self) -> None:
        """Wait for the end of the processes that were asked to end before this call."""
        ending = {*self._leaving, *self._dropping}
        if ending:
            await asyncio.wait(ending)

    async def close(self) -> None:
        """Retire all slots at once; return when they, and templates that were asked to end, have ended."""
        for slot in (*self.placed, *self._leaving.values()):
            self.dismiss(slot, at_once=True)
        self.placed.clear()
        self._context.dispatcher.living_slots = 0
        await self.wait_until_gone()
        if self._dropping:
            await asyncio.wait(self._dropping)

    def _make(self) -> Slot:
        """A slot for one more worker, with its device or its group of devices."""
        context = self._context
        options, launchers, level = context.options, context.launchers, context.options.parallel_level
        devices = context.reservations.place()
        if not level or not options.gpu_ids:
            assign = launchers.devices.assign
            gpu_id = devices[0] if devices else assign(options.model, options.version, options.gpu_ids)
            return Slot(launchers.next_worker_id(level), context, gpu_id)
        if not devices:
            living = [slot.devices for slot in self.placed]
            leaving = [slot.devices for slot in self._leaving.values()]
            devices = choose_group(options.gpu_ids, level, living, leaving)
        return Slot(launchers.next_worker_id(level), context, devices[0], devices=devices)
