"""What runs beside a server for its own sake."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from pathlib import Path
from typing import Any, cast

import pytest

from marserve.app import server
from marserve.app.building.access import AccessControl
from marserve.app.building.cannot_start import CannotStart
from marserve.app.building.tasks import keep
from marserve.machine.describe import describe_machine
from marserve.settings import Settings, load_settings

pytestmark = pytest.mark.anyio


async def test_records_that_were_left_out_are_reported_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack that is over is reported, too, although nothing more is logged."""
    monkeypatch.setattr(server, "TELL_EVERY_S", 0.001)
    calls: list[float] = []
    twice = asyncio.Event()

    class Logs:
        def tell_left_out(self, now: float) -> None:
            calls.append(now)
            if len(calls) == 2:
                twice.set()

    async with contextlib.AsyncExitStack() as stack:
        task = keep(stack, server.tell_left_out(cast("Any", Logs())))
        await asyncio.wait_for(twice.wait(), 5)

    assert task.cancelled()
    assert calls[1] > calls[0]


async def test_probes_of_the_start_show_the_certificate_that_is_shown_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is made up was made anew for the server, so a client that trusted the first refused the second."""
    shown: list[ssl.SSLContext | None] = []

    async def look(settings: Settings, stop: object, tls: ssl.SSLContext | None) -> object:
        shown.append(tls)
        return describe_machine({}, is_strict=False, uses_devices=False)

    async def build(settings: Settings, logs: object, machine: object, access: AccessControl, *rest: object) -> object:
        shown.append(access.tls)
        raise CannotStart("it was seen")

    monkeypatch.setattr(server, "look_at_machine", look)
    monkeypatch.setattr(server, "build_parts", build)
    settings = load_settings("marserve", {"inference_address": "https://127.0.0.1:8443"}, {}, tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(CannotStart, match="it was seen"):
            await server.Server(settings, cast(Any, None)).serve()
    finally:
        for number, hears in before.items():
            signal.signal(number, hears)

    assert isinstance(shown[0], ssl.SSLContext)
    assert shown[0] is shown[1]
