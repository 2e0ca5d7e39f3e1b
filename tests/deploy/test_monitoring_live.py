"""A real Prometheus with the rules beside a real server under load: queries have answers, and alerts fire."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.pages import ROOT
from support.plugin_packages import HOLDS, Installation
from support.server import Server, free_ports, make_archive, poll
from support.summaries import SUMMARISE, write_round

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian's will do)"),
]

RULES = ROOT / "docker/monitoring/marserve.rules.yml"
HANDLER = """
import os, time
def handle(data, context):
    if not data:
        return []
    {does}
    return [b"ok" for _ in data]
"""
DOES = {"slow": "time.sleep(1.5)", "fails": "raise ValueError('no')", "dies": "os._exit(3)"}
# What no server without a device has.
NEEDS_DEVICE = re.compile("marserve_device_")
# Nor is there a part of an alert for what this one does not use: a desired state, a watched place.
UNUSED = re.compile("marserve_(desired_state|watch)_")
# A selector of an alert, with the range that it is asked over, as promtool writes it.
SELECTOR = re.compile(r"[a-z_]*(?:marserve|model_version)[:_][a-z0-9_:]+(?:\{[^}]*\})?(?:\[\w+\])?|\bup\{[^}]*\}")


class Prometheus:
    """A Prometheus that looks at one server, with the rules at a faster pace."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, query: str) -> list[Any]:
        """The series that answer a query. Raises AssertionError for one that is not understood."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": query}, timeout=20)
        assert answer.status_code == 200, (query, answer.text)
        return list(answer.json()["data"]["result"])


@contextmanager
def watching(target: str, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus that is ready; it is gone afterwards."""
    [port] = free_ports(1)
    folder.mkdir()
    text = re.sub(r"interval: \w+", "interval: 1s", RULES.read_text())
    (folder / "marserve.rules.yml").write_text(re.sub(r"\bfor: \w+", "for: 1s", text))
    scrape = {"job_name": "marserve", "scrape_interval": "1s", "scrape_timeout": "1s"}
    settings = {
        "rule_files": ["marserve.rules.yml"],
        "scrape_configs": [{**scrape, "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        found = Prometheus(url)
        for _ in poll(60, "Prometheus has seen the server"):
            assert process.poll() is None, (folder / "log").read_text()
            try:
                if httpx.get(f"{url}/-/ready").status_code == 200 and found.ask("up == 1"):
                    break
            except httpx.TransportError:
                continue
        yield found
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Requests to all three models, until the block ends."""
    ends = threading.Event()

    def ask(model: str) -> None:
        with httpx.Client(timeout=60) as client:
            while not ends.is_set():  # a body that has ended two workers is refused: each is another one
                client.post(f"{server.inference}/predictions/{model}", content=os.urandom(8))
                ends.wait(0.05)

    threads = [threading.Thread(target=ask, args=(model,)) for model in ("slow",) * 12 + ("fails", "dies")]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join(60)


def everything_asked() -> Iterator[str]:
    """The queries of the recording rules and of the dashboards, with all that the variables could choose."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"] if "record" in rule)
    for path in sorted((ROOT / "docker/monitoring/dashboards").glob("*.json")):
        text = re.sub(r"\$(instance|model|version)\b", ".*", path.read_text()).replace("$__rate_interval", "1m")
        yield from (target["expr"] for panel in yaml.safe_load(text)["panels"] for target in panel["targets"])


def alerts() -> Iterator[tuple[str, str]]:
    """Each alert's name and expression."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"] if "alert" in rule)


def parts_of_alerts() -> Iterator[str]:
    """What the alerts look at, selector by selector: all of an expression is empty while nothing is wrong."""
    for name, expression in alerts():
        found = SELECTOR.findall(expression)
        assert found, (name, expression)
        yield from found


def test_under_load_every_query_has_an_answer_and_alerts_fire(tmp_path: Path) -> None:
    """One model fails, one ends its worker each time, before one requests wait while it is rolled out, and a plug-in
    holds the loop.
    """
    installation = Installation(tmp_path)
    installation.install("acme-holds", HOLDS, {"marserve.endpoints": {"holds": "{module}:Holds"}})
    store = tmp_path / "store"
    store.mkdir()
    for model, does in DOES.items():
        make_archive(store / f"{model}.mar", HANDLER.format(does=does))
    make_archive(store / "slow2.mar", HANDLER.format(does=DOES["slow"]), name="slow", version="2.0")
    settings = {"loop_stall_threshold": "0.1", "metrics_mode": "prometheus", "job_queue_size": "3"}
    environment = {"PYTHONPATH": str(installation.folder)}
    with Server(tmp_path, entry="marserve", store=store, settings=settings, environment=environment) as server:
        for model in DOES:
            assert server.register(f"{model}.mar", initial_workers=1, synchronous="true").status_code == 200
        rolled = {"version": "2.0", "url": "slow2.mar", "steps": [50, 100], "hold": 600}
        begun = server.client.post(f"{server.management}/models/slow/rollout", json=rolled)
        assert begun.status_code == 202, begun.text
        target = server.metrics.removeprefix("http://")
        with watching(target, tmp_path / "prometheus") as prometheus, load(server):
            wanted = {"MarserveWorkersDie", "MarserveRequestsWait", "MarserveRequestsFail", "MarserveLoopStalls"}
            fired: set[str] = set()
            for _ in poll(75, "they fire"):
                httpx.post(f"{server.inference}/hold", content=b"0.3", timeout=30)
                with socket.create_connection(("127.0.0.1", httpx.URL(server.inference).port or 0), 10) as malformed:
                    malformed.sendall(b"no request\r\n\r\n")
                    malformed.recv(1)
                fired = {each["metric"]["alertname"] for each in prometheus.ask('ALERTS{alertstate="firing"}')}

                if fired >= wanted:
                    break
            for _, expression in alerts():
                prometheus.ask(expression)  # understood as a whole; most are empty
            empty = [query for query in (*everything_asked(), *parts_of_alerts()) if not prometheus.ask(query)]

    assert [query for query in empty if not NEEDS_DEVICE.search(query) and not UNUSED.search(query)] == []
    assert not fired & {"MarserveNotScraped", "MarserveDeviceLost", "MarserveDesiredStateFailed", "MarserveWatchFails"}


def test_the_case_of_slow_requests_fires_its_alert_and_no_other(tmp_path: Path) -> None:
    """docs/slow-requests.md begins with it: mails wait behind contracts, and nothing is broken."""
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "summaries.mar", SUMMARISE)
    with Server(tmp_path, entry="marserve", store=store, settings={"metrics_mode": "prometheus"}) as server:
        assert server.register("summaries.mar", initial_workers=1, synchronous="true").status_code == 200
        with watching(server.metrics.removeprefix("http://"), tmp_path / "prometheus") as prometheus:
            fired: dict[str, str] = {}
            for number, _ in enumerate(poll(75, "it fires")):
                write_round(server, number)
                firing = prometheus.ask('ALERTS{alertstate="firing"}')
                fired = {each["metric"]["alertname"]: each["metric"].get("model", "") for each in firing}
                if fired:
                    break

    assert fired == {"MarserveRequestsWait": "summaries"}
