"""Two instances behind nginx, restarted one after the other under load: no request fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.nginx import running
from support.open_loop import OpenLoop, Outcome, Shot, count_by_status, evenly, post
from support.pages import block
from support.server import Server, free_ports, make_archive, poll

PAGE = "docs/deploy/life-in-a-cluster.md"
ECHO = """
def handle(rows, context):
    if rows is None:
        return None
    return [bytes(row["body"]) for row in rows]
"""


@contextlib.contextmanager
def two_behind_nginx(folder: Path, drain_delay_s: float) -> Iterator[tuple[int, list[Server]]]:
    """The port of an nginx as the page has it, and the two instances behind it."""
    (folder / "store").mkdir()
    make_archive(folder / "store/echo.mar", ECHO)
    [port] = free_ports(1)
    with contextlib.ExitStack() as stack:
        servers = []
        for name in ("one", "other"):
            (folder / name).mkdir()
            settings = {"drain_delay": str(drain_delay_s), "load_models": "echo.mar"}
            servers.append(Server(folder / name, store=folder / "store", settings=settings))
        text = block(PAGE, "nginx").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        for documented, server in zip(("127.0.0.1:8080", "127.0.0.1:8090"), servers, strict=True):
            assert documented in text
            text = text.replace(documented, server.inference.removeprefix("http://"))
        stack.enter_context(running(folder / "nginx", text, port))
        for server in servers:
            stack.enter_context(server)
            wait_until_ready(server)
        yield port, servers


def wait_until_ready(server: Server) -> None:
    """Return when the server is to be sent requests."""
    for _ in poll(30, "the server is ready"):
        if server.client.get(f"{server.inference}/readyz").status_code == 200:
            return


def restart_all(servers: list[Server]) -> None:
    """One after the other."""
    for server in servers:
        server.stop()
        server.start()
        wait_until_ready(server)


def fire_until(done: threading.Event, port: int, rate: float) -> list[Outcome]:
    """So many requests a second, second by second, until it is done; each has a body of its own."""
    outcomes: list[Outcome] = []
    number = 0

    async def fire() -> None:
        nonlocal number
        while not done.is_set():
            shots = []
            for due in evenly(rate, 1.0):
                number += 1
                shots.append(Shot(due, str(number), post("echo", str(number).encode())))
            outcomes.extend(await OpenLoop(port).fire(shots))

    asyncio.run(fire())
    return outcomes


def restart_under_load(folder: Path, *, rate: float, drain_delay_s: float) -> None:
    """Every request is answered, with its own body."""
    with two_behind_nginx(folder, drain_delay_s) as (port, servers), ThreadPoolExecutor(1) as threads:
        done = threading.Event()
        load = threads.submit(fire_until, done, port, rate)
        try:
            restart_all(servers)
        finally:
            done.set()
        outcomes = load.result()
        lines = [line for server in servers for line in server.output().splitlines()]

    assert len(outcomes) >= 2 * drain_delay_s * rate
    assert count_by_status(outcomes) == {200: len(outcomes)}
    assert [outcome.shot.name for outcome in outcomes if outcome.body.decode() != outcome.shot.name] == []
    assert sum("SIGTERM: draining" in line for line in lines) == 2
    assert not [line for line in lines if "refused (" in line]


def test_a_rolling_restart_fails_no_request(tmp_path: Path) -> None:
    """The short form: 100 requests a second."""
    restart_under_load(tmp_path, rate=100, drain_delay_s=0.5)


@pytest.mark.long
def test_a_rolling_restart_at_a_thousand_requests_a_second_fails_none(tmp_path: Path) -> None:
    """With the delay that containers have."""
    restart_under_load(tmp_path, rate=1000, drain_delay_s=5)
