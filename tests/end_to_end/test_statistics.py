"""Statistics of a real server: what its models did, and `marserve top` over it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marserve.answers.management import ModelStatistics, ServerActivity
from support.command_line import marserve
from support.documents import document_of
from support.server import Server, make_archive, poll

HANDLER = """
import os, signal

def handle(data, context):
    if data is None:
        return None
    answers = []
    for row in data:
        asked = bytes(next(iter(row.values())))
        if asked == b"fail":
            raise ValueError("no such picture")
        if asked == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        answers.append("ok")
    return answers
"""


def test_what_a_model_did_is_told_by_windows_and_by_top(tmp_path: Path) -> None:
    """Requests, errors, deaths and batches are counted in each window, and add up."""
    with Server(tmp_path, entry="marserve") as server:
        make_archive(server.store / "m.mar", HANDLER)
        assert server.register("m.mar", initial_workers=1).status_code == 200
        for _ in range(20):
            assert server.predict("m", b"x").status_code == 200
        assert server.predict("m", b"fail").status_code == 500
        assert server.predict("m", b"die").status_code == 500
        for _ in poll(30, "the worker is there again"):
            if server.predict("m", b"x").status_code == 200:
                break

        told = server.client.get(f"{server.management}/models/m/stats").json()
        document_of(ModelStatistics, told)
        [version] = told["versions"]
        for window in (version["lastMinute"], version["last60Minutes"], version["sinceStart"]):
            assert window["answers"]["200"] == 21
            assert window["errors"]["handler"] == 1
            assert (window["errors"]["killed"], window["retried"]) == (1, 1)  # it was run once more
            assert window["workerDeaths"]["killed"] == window["workerRestarts"] == 2
            assert 20 <= window["batches"] <= window["requests"] + window["retried"]
            assert 0 < window["milliseconds"]["total"]["p50"] <= window["milliseconds"]["total"]["p99"]
            assert window["requestsPerSecond"] == pytest.approx(window["requests"] / window["seconds"], rel=0.01)

        document_of(ServerActivity, server.client.get(f"{server.management}/stats").json())
        ran = marserve("top", "--json", "--management", server.management)
        [row] = json.loads(ran.out)["versions"]
        assert (row["modelName"], row["readyWorkers"]) == ("m", 1)
        assert row["workers"][0]["why"].startswith("died: killed")

        make_archive(server.store / "reserved.mar", HANDLER, version="stats")
        refused = server.register("reserved.mar", initial_workers=0)
        assert refused.status_code == 400
        assert "'stats' is one of all, check, logs, optimise, profile, stats" in refused.json()["message"]


@pytest.mark.system
def test_a_server_started_as_torchserve_has_versions_of_such_names(tmp_path: Path) -> None:
    """Its routes are TorchServe's; the log warns."""
    with Server(tmp_path) as server:
        make_archive(server.store / "m.mar", HANDLER, version="stats")
        assert server.register("m.mar", initial_workers=0).status_code == 200

        [described] = server.client.get(f"{server.management}/models/m/stats").json()
        assert described["modelVersion"] == "stats"
        assert server.client.get(f"{server.management}/stats").status_code in (404, 405)
        for _ in poll(10, "the warning in a log, which a thread writes"):
            written = "\n".join(path.read_text() for path in (tmp_path / "logs").glob("*.log"))
            if "'stats' is one of all, check, logs, optimise, profile, stats" in written:
                break
