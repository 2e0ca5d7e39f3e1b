"""The look at the machine before a start: bounded, probes answered meanwhile, ended by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme

from marserve.app import early_probes, look
from marserve.app.draining import Stop
from marserve.app.early_probes import EarlyProbes
from marserve.app.listeners import bind
from marserve.app.look import look_at_machine
from marserve.errors import BadSettings
from marserve.settings import Settings, load_settings
from support.processes import living
from support.server import free_ports

pytestmark = pytest.mark.anyio

ROW = "0, GPU-0a, H100, 00000000:1B:00.0, 81559, Disabled"


class SlowTool:
    """An `nvidia-smi` that answers when it is told to."""

    def __init__(self, folder: Path) -> None:
        self._gate = folder / "gate"
        os.mkfifo(self._gate)
        tool = folder / "nvidia-smi"
        self._began = folder / "began"
        tool.write_text(f'#!/bin/sh\necho $$ > {self._began}\nread -r line < {self._gate}\necho "$line"\n')
        tool.chmod(0o755)

    @property
    def pid(self) -> int | None:
        """The id of its process; None before it has begun."""
        written = self._began.read_text() if self._began.exists() else ""
        return int(written) if written.endswith("\n") else None

    def answer(self) -> None:
        """Have it print one device. Blocks until it runs."""
        self._gate.write_text(f"{ROW}\n")


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlowTool:
    """The tool, in a PATH with what a shell needs, asked by a start that answers probes at once."""
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}{os.pathsep}/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(look, "PROBES_AFTER_S", 0.05)
    return SlowTool(tmp_path / "tools")


def settings_of(folder: Path, entry: str = "marserve", **flags: object) -> Settings:
    """Settings on free ports."""
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in free_ports(3))
    addresses = {"inference_address": inference, "management_address": management, "metrics_address": metrics}
    given = {**addresses, "model_store": str(folder), **flags}
    return load_settings(entry, given, {}, folder)  # type: ignore[arg-type]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Something that asks probes."""
    async with httpx.AsyncClient(timeout=10) as made:
        yield made


async def answer_of(client: httpx.AsyncClient, url: str) -> httpx.Response:
    """The first answer there, waiting until the address is bound."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await client.get(url)
            except httpx.TransportError:
                await asyncio.sleep(0.01)


async def test_probes_are_answered_while_a_tool_takes_its_time(
    tmp_path: Path, tool: SlowTool, client: httpx.AsyncClient
) -> None:
    """`/livez` on every address; the rest is 503 with the reason. Then the addresses are free, and the device found."""
    settings = settings_of(tmp_path)
    looking = asyncio.ensure_future(look_at_machine(settings, Stop()))

    alive = [await answer_of(client, f"{settings.inference_address}/livez")]
    alive += [
        await client.get(f"{settings.management_address}/livez"),
        await client.get(f"{settings.metrics_address}/livez"),
    ]
    ready = await client.get(f"{settings.inference_address}/readyz?verbose")
    asked = await client.post(f"{settings.inference_address}/predictions/m", content=b"x" * 10_000)
    await asyncio.to_thread(tool.answer)
    machine = await looking

    assert [answer.status_code for answer in alive] == [200] * 3
    assert (ready.status_code, asked.status_code) == (503, 503)
    assert "looking for accelerators" in ready.json()["reasons"][0]
    assert ready.headers["retry-after"] == "1"
    assert machine is not None
    assert [device.uuid for device in machine.devices] == ["GPU-0a"]
    bind(settings.inference_address).close()


async def test_a_client_that_sends_nothing_holds_nothing_up(tmp_path: Path, tool: SlowTool) -> None:
    """Its connection ends with the look."""
    settings = settings_of(tmp_path)
    looking = asyncio.ensure_future(look_at_machine(settings, Stop()))
    async with asyncio.timeout(20):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", settings.inference_address.port)
                break
            except OSError:
                await asyncio.sleep(0.01)
    writer.write(b"GET /livez HTTP/1.1\r\n")
    await asyncio.to_thread(tool.answer)

    assert await looking is not None
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()


async def test_an_address_answers_a_bounded_number_of_connections_at_a_time(
    tmp_path: Path, tool: SlowTool, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is closed at once; other addresses answer, and so does this one when a client has gone."""
    monkeypatch.setattr(early_probes, "MOST_CONNECTIONS", 2)
    settings = settings_of(tmp_path)
    looking = asyncio.ensure_future(look_at_machine(settings, Stop()))
    assert (await answer_of(client, f"{settings.inference_address}/livez")).status_code == 200
    held = [await asyncio.open_connection("127.0.0.1", settings.inference_address.port) for _ in range(2)]

    with pytest.raises(httpx.TransportError):
        await client.get(f"{settings.inference_address}/livez")
    other = await client.get(f"{settings.management_address}/livez")
    for _, writer in held:
        writer.close()
    again = await answer_of(client, f"{settings.inference_address}/livez")
    await asyncio.to_thread(tool.answer)
    await looking

    assert (other.status_code, again.status_code) == (200, 200)


async def test_a_signal_ends_the_look(tmp_path: Path, tool: SlowTool) -> None:
    """At once; the tool is ended with it."""
    stop = Stop()
    looking = asyncio.ensure_future(look_at_machine(settings_of(tmp_path), stop))
    async with asyncio.timeout(20):
        while (pid := tool.pid) is None:
            await asyncio.sleep(0.01)
    began = time.monotonic()
    stop.on_signal(signal.SIGTERM)

    assert await looking is None
    assert time.monotonic() - began < 10
    async with asyncio.timeout(10):
        while living([pid]):
            await asyncio.sleep(0.01)


async def test_a_tool_that_does_not_answer_at_all_is_told(tmp_path: Path, tool: SlowTool) -> None:
    """`torchserve` starts without devices and has a remark; number_of_gpu=0 asks nothing."""
    machine = await look_at_machine(settings_of(tmp_path, "torchserve"), Stop(), limit_s=0.3)
    without = await look_at_machine(settings_of(tmp_path, number_of_gpu=0), Stop(), limit_s=0.3)

    assert machine is not None
    assert machine.devices == ()
    assert "nvidia-smi did not answer within 0.3 s" in machine.remarks[0]
    assert without is not None
    assert without.remarks == ()


async def test_devices_that_are_named_and_cannot_be_read_end_a_strict_start(
    tmp_path: Path, tool: SlowTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tool's word and the way to go on without."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    with pytest.raises(BadSettings, match=r"did not answer within 0\.3 s.*number_of_gpu=0"):
        await look_at_machine(settings_of(tmp_path), Stop(), limit_s=0.3)


async def test_what_is_being_read_when_probes_end_is_over_then(tmp_path: Path) -> None:
    """A start that was ended by a signal logged a traceback for each client that had not sent all of its header."""
    settings = settings_of(tmp_path)
    before = asyncio.all_tasks()
    async with EarlyProbes(settings, None, "why"):
        address = settings.inference_address
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET / HT")
        async with asyncio.timeout(10):
            while asyncio.all_tasks() == before:
                await asyncio.sleep(0.001)
    assert asyncio.all_tasks() == before
    writer.close()


async def test_handshakes_count_among_the_connections_of_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that connects and never begins TLS takes a place as one that sends no header does, and gives it back."""
    monkeypatch.setattr(early_probes, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(early_probes, "HANDSHAKE_S", 120.0)
    authority = trustme.CA()
    server, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(server)
    authority.configure_trust(trusting)
    port = free_ports(1)[0]
    settings = settings_of(tmp_path, inference_address=f"https://127.0.0.1:{port}")

    async def probe() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
        try:
            return await reader.read()
        finally:
            writer.close()

    async with EarlyProbes(settings, server, "why"):
        assert (await probe()).startswith(b"HTTP/1.1 200 OK")
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(1), 30) == b""  # at once, though no handshake has failed
        for each in (writer, *(held_writer for _, held_writer in held)):
            each.close()
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError):
                    if (await probe()).startswith(b"HTTP/1.1 200 OK"):
                        break
                await asyncio.sleep(0.01)
