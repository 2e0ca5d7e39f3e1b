"""`overlapPreprocess` and `peakFlops` from an archive's configuration to describe and the metrics page."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import pytest

from support.processes import until_blocking
from support.server import Server, make_archive

pytestmark = pytest.mark.system

HANDLER = """
import os, time
from marserve_handlers.base import BaseHandler

class Handler(BaseHandler):
    def initialize(self, context):
        self.context = context

    def preprocess(self, data):
        words = [bytes(row["body"]).decode() for row in data]
        with open(os.environ["CALLS"], "a") as calls:
            calls.write(f"{words[0]}\\n")
        return words

    def inference(self, words):
        while words == ["first"] and not os.path.exists(os.environ["CALLS"] + ".go"):
            time.sleep(0.005)
        return words

    def postprocess(self, words):
        return words
"""


def test_a_server_preprocesses_ahead_and_says_what_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request is read while the first one computes."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(calls))
    store = tmp_path / "store"
    store.mkdir()
    make_archive(store / "net.mar", HANDLER, config="overlapPreprocess: true\npeakFlops: 1e12\n")
    with Server(tmp_path, entry="marserve", store=store) as server:
        server.register("net.mar", initial_workers=1, synchronous="true").raise_for_status()
        with concurrent.futures.ThreadPoolExecutor(2) as clients:
            asked = [clients.submit(server.predict, "net", "first")]
            until_blocking(lambda: calls.exists() and "first" in calls.read_text(), "the first request")
            asked.append(clients.submit(server.predict, "net", "second"))
            until_blocking(lambda: "second" in calls.read_text(), "the second one, beside it")
            were_done = [each.done() for each in asked]
            Path(f"{calls}.go").touch()
            answers = [each.result().text for each in asked]
        described = server.describe("net")

    assert were_done == [False, False]
    assert answers == ["first", "second"]
    assert described["overlapPreprocess"] is True
    assert described["peakFlops"] == 1e12
    assert described["warnings"] == [
        "FLOPs are not counted: the handler holds no module of torch and no session of ONNX Runtime"
    ]
