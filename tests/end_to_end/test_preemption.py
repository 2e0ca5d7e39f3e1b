"""A machine that is taken away announces it, and the server drains: by a file, a signal, or a plug-in that asks."""

from __future__ import annotations

import shlex
import signal
import threading
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from support.pages import block
from support.plugin_packages import Installation
from support.server import Server, make_archive, poll

pytestmark = pytest.mark.system

PAGE = "docs/deploy/life-in-a-cluster.md"
SLOW = """
import time
def handle(rows, context):
    if rows is None:
        return None
    time.sleep(1)
    return ["answered"] * len(rows)
"""


class Metadata(BaseHTTPRequestHandler):
    """A cloud's metadata address, of which 404 is no news."""

    news: ClassVar[dict[str, bytes]]
    asked: ClassVar[threading.Semaphore]

    def do_GET(self) -> None:
        """What there is to say."""
        body = self.news.get(self.path, b"")
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.asked.release()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads."""


@contextmanager
def metadata() -> Iterator[tuple[str, type[Metadata]]]:
    """Its address, and where news are put."""

    class Own(Metadata):
        news: ClassVar[dict[str, bytes]] = {}
        asked = threading.Semaphore(0)

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", Own
        finally:
            server.shutdown()
            thread.join()


def option(line: str) -> tuple[str, str]:
    """Key and value that a line of the page sets."""
    words = shlex.split(line)
    assert words[:3] == ["marserve", "start", "--foreground"]
    key, _, value = words[words.index("--set") + 1].partition("=")
    return key, value


def drains(server: Server, give_notice: Callable[[], object], said: str) -> None:
    """After the notice the request that runs is answered, though SIGTERM follows; then the server ends well."""
    server.register("slow.mar").raise_for_status()
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.predict, "slow")
        for _ in poll(5, "the request runs"):
            if server.describe("slow")["runningRequests"]:
                break

        give_notice()
        for _ in poll(10, "it drains"):
            if said in server.output():
                break
        server.stop()  # proves that it ends with status 0, and leaves nothing

        assert asked.result().text == "answered"
    assert "again: stopping now" not in server.output()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one slow model."""
    (tmp_path / "store").mkdir()
    make_archive(tmp_path / "store" / "slow.mar", SLOW)
    return tmp_path / "store"


def test_a_file_that_appears_begins_the_drain(tmp_path: Path, store: Path) -> None:
    """As the page sets it."""
    key, value = option(block(PAGE, "file"))
    file = tmp_path / Path(value).name
    with Server(tmp_path, store=store, settings={key: str(file), "preemption_interval": "0.05"}) as server:
        drains(server, file.touch, f"This machine is to go: the file {file}: it has appeared: draining")


def test_a_signal_begins_the_drain(tmp_path: Path, store: Path) -> None:
    """The one that the page chooses."""
    key, value = option(block(PAGE, "signal"))
    with Server(tmp_path, store=store, settings={key: value}) as server:
        process = server.process
        assert process is not None
        drains(server, lambda: process.send_signal(signal.Signals[value]), f"{value}: this machine is to go: draining")


def test_a_plug_in_that_asks_the_metadata_address_begins_the_drain(tmp_path: Path, store: Path) -> None:
    """The page's own, at an address of ours; one that fails for a while does no harm."""
    installation = Installation(tmp_path)
    points = tomllib.loads(block(PAGE, "entry-point"))["project"]["entry-points"]["marserve.preemption"]
    name, _, attribute = points["spot"].partition(":")
    installation.install(
        "acme-spot", block(PAGE, "plug-in"), {"marserve.preemption": {"spot": f"{{module}}:{attribute}"}}
    )
    assert name == "acme_spot"
    with metadata() as (address, cloud):
        environment = {"PYTHONPATH": str(installation.folder), "METADATA_ADDRESS": address}
        settings = {"preemption_interval": "0.05"}
        with Server(tmp_path, store=store, settings=settings, environment=environment) as server:
            for _ in range(2):
                assert cloud.asked.acquire(timeout=10)
            assert "draining" not in server.output()

            def announce() -> None:
                cloud.news["/latest/meta-data/spot/instance-action"] = b'{"action": "terminate"}'

            drains(server, announce, 'instance-action: {"action": "terminate"}: draining')
