"""A call that holds the event loop of a real server: what the log, the metrics and `/livez` say, and how it ends."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import pytest

from support.plugin_packages import HOLDS, Installation
from support.server import Server, poll

pytestmark = pytest.mark.system


def installed(folder: Path) -> dict[str, str]:
    """The environment of a server with a plug-in that holds the loop for as long as it is told."""
    installation = Installation(folder)
    installation.install("acme-holds", HOLDS, {"marserve.endpoints": {"holds": "{module}:Holds"}})
    return {"PYTHONPATH": str(installation.folder)}


def sample(page: str, name: str) -> float:
    """The value of a sample of the metrics page."""
    return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"{name} "))


def test_a_held_loop_is_told_of_and_the_server_is_not_alive_for_a_while(tmp_path: Path) -> None:
    """The log names the call; `/livez` is 503 for as long as is set, `/readyz` is not touched."""
    settings = {"loop_stall_threshold": "0.3", "livez_after_stall": "3", "metrics_mode": "prometheus"}
    with Server(tmp_path, entry="marserve", settings=settings, environment=installed(tmp_path)) as server:
        assert server.client.get(f"{server.inference}/livez").json() == {"status": "alive", "reasons": []}

        assert server.client.post(f"{server.inference}/hold", content="2").text == "done"

        for _ in poll(3, "it is not well"):  # on a busy machine the watchdog may come later than the answer
            unwell = server.client.get(f"{server.inference}/livez")
            if unwell.status_code == 503:
                break
        assert unwell.json()["status"] == "stalled"
        assert unwell.json()["reasons"][0].startswith("the event loop stood still for ")
        assert server.client.get(f"{server.inference}/readyz").status_code == 200
        for _ in poll(10, "it is well again"):
            if server.client.get(f"{server.management}/livez").status_code == 200:
                break
        page = server.client.get(f"{server.metrics}/metrics").text
        assert sample(page, 'marserve_loop_stalls_total{reason="held"}') >= 1
        assert sample(page, "marserve_loop_longest_stall_seconds") > 0.3
        assert sample(page, 'marserve_loop_lag_seconds_bucket{le="+Inf"}') > 10
        assert "The event loop stands still" in server.output()
        assert "time.sleep(float(call.body))" in server.output()


def test_a_server_that_was_stopped_is_alive_when_it_goes_on(tmp_path: Path) -> None:
    """The machine was suspended, say."""
    settings = {"loop_stall_threshold": "0.3", "abort_when_stuck": "0.5"}
    with Server(tmp_path, entry="marserve", settings=settings) as server:
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)  # the claim is about time that passes
        server.process.send_signal(signal.SIGCONT)

        assert server.client.get(f"{server.inference}/livez").status_code == 200
        for _ in poll(10, "it says so"):
            if "This process did not run for" in server.output():
                break
        assert "stands still" not in server.output()


def test_a_server_that_is_stuck_ends_where_that_is_set(tmp_path: Path) -> None:
    """With a status of its own, the place in its log, and nothing left."""
    settings = {"loop_stall_threshold": "0.3", "abort_when_stuck": "1"}
    with Server(tmp_path, entry="marserve", settings=settings, environment=installed(tmp_path)) as server:
        assert server.process is not None
        with pytest.raises(httpx.HTTPError):
            server.client.post(f"{server.inference}/hold", content="60")

        assert server.process.wait(10) == 70
        server.process = None
        output = server.output()
        assert "abort_when_stuck is 1 s: marserve ends now, with exit status 70" in output
        assert "time.sleep(float(call.body))" in output
