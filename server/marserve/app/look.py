"""Reads what the machine has, at the start. It takes bounded time, answers probes meanwhile, and ends at a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from functools import partial
from typing import Any

from marserve.app.building.cannot_start import CannotStart
from marserve.app.draining import Stop
from marserve.app.early_probes import EarlyProbes
from marserve.errors import without_stop
from marserve.machine.describe import LOOK_S, Machine, describe_machine
from marserve.machine.own_thread import in_own_thread
from marserve.machine.vendors.tools import Tools
from marserve.settings import Settings

log = logging.getLogger("marserve.app")

# Probes are answered after so long; most machines take less.
PROBES_AFTER_S = 1.0
# NVIDIA's library comes after the tools; it may hang, as they may.
LIBRARY_S = 5.0


async def look_at_machine(
    settings: Settings, stop: Stop, tls: ssl.SSLContext | None = None, *, limit_s: float = LOOK_S
) -> Machine | None:
    """What the machine has; None if a signal came first. Waits `limit_s` for tools, a little more for a library.

    `tls` is for probes on https addresses.

    Raises CannotStart or BadSettings for devices that are missing or cannot be read, if the entry is strict about it.
    """
    tools = Tools(limit_s)
    is_strict = settings.entry == "marserve"
    look = partial(describe_machine, os.environ, is_strict=is_strict, uses_devices=settings.number_of_gpu != 0)
    looking = in_own_thread(partial(look, run=tools), "look")
    try:
        if not await _has_ended(looking, stop, PROBES_AFTER_S) and not stop.asked.is_set():
            reason = f"looking for accelerators: their tools have not answered yet, and have {limit_s:g} s"
            log.info("%s%s; /livez answers meanwhile", reason[0].upper(), reason[1:])
            async with EarlyProbes(settings, tls, reason):
                await _has_ended(looking, stop, limit_s + LIBRARY_S - PROBES_AFTER_S)
        if stop.asked.is_set():
            tools.cancel()
            return None
        if looking.done():
            return await looking
    finally:
        looking.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, else asyncio logs it
    sentence = "Accelerators cannot be read: NVIDIA's library does not answer"
    if is_strict:
        raise CannotStart(
            f"{without_stop(sentence)}. Mend the driver, or set number_of_gpu=0 to serve without devices."
        )
    machine = await asyncio.to_thread(describe_machine, os.environ, uses_devices=False)
    return machine._replace(remarks=(f"{without_stop(sentence)}. Models are served without devices.",))


async def _has_ended(looking: asyncio.Future[Machine], stop: Stop, limit_s: float) -> bool:
    asked = asyncio.ensure_future(stop.asked.wait())
    waited: list[asyncio.Future[Any]] = [looking, asked]
    await asyncio.wait(waited, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    return looking.done()
