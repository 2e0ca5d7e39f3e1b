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
from support.turns import let_all_run

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


class Loading:
    """A start: first its models are read, then they are loaded."""

    def __init__(self) -> None:
        self.may_be_read, self.is_loaded, self.stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.reading = asyncio.ensure_future(self.may_be_read.wait())

    async def wait_for_loads(self) -> None:
        """As the registry does."""
        assert self.reading.done(), "what is not read yet is not waited for"
        await self.is_loaded.wait()

    def wait(self, limit_s: float) -> asyncio.Future[None]:
        """What is to be seen of the server's wait."""
        waits = server.wait_for_models(cast("Any", self), cast("Any", self.reading), self.stop, limit_s)
        return asyncio.ensure_future(waits)


async def test_connections_wait_until_the_models_of_the_start_are_loaded() -> None:
    """Being read is not enough; the limit is far away."""
    loading = Loading()
    waiting = loading.wait(limit_s=600)
    await let_all_run()
    assert not waiting.done()

    loading.may_be_read.set()
    await let_all_run()
    assert not waiting.done()

    loading.is_loaded.set()
    async with asyncio.timeout(10):
        await waiting


@pytest.mark.parametrize("read", [False, True])
async def test_connections_do_not_wait_longer_for_models_than_the_limit(read: bool) -> None:
    """Whether they are still being read or being loaded, and both go on."""
    loading = Loading()
    if read:
        loading.may_be_read.set()

    async with asyncio.timeout(10):
        await loading.wait(limit_s=0.01)

    assert not loading.is_loaded.is_set()
    assert loading.reading.done() is read
    loading.reading.cancel()


async def test_a_stop_ends_the_wait_for_models() -> None:
    """Not only after its limit."""
    loading = Loading()
    waiting = loading.wait(limit_s=600)
    await let_all_run()

    loading.stop.set()

    async with asyncio.timeout(10):
        await waiting
    loading.reading.cancel()
