"""Every call that a server describes, drawn by schemathesis as described and otherwise, on all its ports."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from support.pages import block
from support.server import Server, make_archive
from support.workflow_archives import write_war

if TYPE_CHECKING:
    from support.described_calls import Calls

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SEED = 18
PORTS = ("inference", "metrics", "management")
MODELS = ("sums", "shout", "echo")
KNOWN = {
    "model_name": list(MODELS),
    "model_version": ["1.0"],
    "workflow_name": ["flow"],
    "url": ["spare.mar", "sums-2.mar", "sums.mar", "flow.war"],
    "number": ["1"],
    "name": ["region"],
    "label": ["stable"],
    "order": ["pause", "resume", "abort", "promote"],
    "file": ["new.mar"],
}
VERSION = {"$ref": "#/components/schemas/version"}
# Values of members of bodies, and the schemas that allow no others.
MEMBERS: dict[str, list[Any] | dict[str, Any]] = {
    "url": KNOWN["url"],
    "key": ["region", "/region"],
    "byte_size": [8, 64, 65],
    "version": ["1.0", "2.0"],
    "weights": [{"1.0": 1}, {"1.0": 80, "2.0": 20}, {"3.0": 1}],
    "instances": [[{"pair": [1, 2]}], ["a", "b"], [], [{"b64": "AA=="}]],
    "inputs": [
        [{"name": "pair", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}],
        [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}],
        [{"name": "pair", "datatype": "FP32", "shape": [2, 2], "data": [[1e999, None], []]}],
        [{"name": "pair", "datatype": "FP32", "shape": [1 << 62, 1 << 62], "data": []}],
    ],
    "models": {"type": "object", "properties": {"sums": {"$ref": "#/components/schemas/model"}}},
    "versions": {"type": "object", "properties": {"1.0": VERSION, "2.0": VERSION}, "additionalProperties": False},
}
# As authors wrote them for TorchServe: a class that takes rows of forms and bodies.
ECHO = """
from ts.torch_handler.base_handler import BaseHandler

class Echo(BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def handle(self, data, context):
        return [repr(sorted(row.items()))[:200] for row in data]
"""
FLOW = "models:\n  middle:\n    url: spare.mar\ndag:\n  prepare: [middle]\n  middle: [finish]\n"
NODES = """
def prepare(data, context):
    return None if data is None else [repr(sorted(row)).encode() for row in data]

finish = prepare
"""
MOST_GROWN_BYTES = 100 << 20
QUICK_S = 0.05


def bring_back(server: Server) -> None:
    """Whatever calls have done, each model is there with a worker, by calls that may be refused."""
    listed = server.client.get(f"{server.management}/models", params={"limit": 100}).json()["models"]
    names = {each["modelName"] for each in listed}
    for name in {name for name in names if "__" not in name} - set(MODELS):  # nodes of the workflow stay
        server.client.delete(f"{server.management}/models/{name}")
    server.client.post(f"{server.management}/workflows", params={"url": "flow.war"})
    for name in MODELS:
        if name not in names:
            server.register(f"{name}.mar")
        else:
            server.client.put(f"{server.management}/models/{name}", params={"min_worker": 1, "synchronous": "true"})
    server.register("sums-2.mar")
    server.client.put(f"{server.management}/models/sums/1.0/set-default")
    if server.entry == "marserve":
        region = f"{server.management}/v2/systemsharedmemory/region/region/register"
        server.client.post(region, json={"key": "region", "byte_size": 64})


def quickest_s(ask: Callable[[], httpx.Response]) -> float:
    """The least time of ten answers, which are 200."""
    took = []
    for _ in range(10):
        begun = time.monotonic()
        answer = ask()
        took.append(time.monotonic() - begun)
        assert answer.status_code == 200, answer.text
    return min(took)


def deaths_of(server: Server) -> list[str]:
    """What the metrics say of workers that died."""
    lines = server.client.get(f"{server.metrics}/metrics").text.splitlines()
    return [line for line in lines if line.startswith("marserve_worker_deaths_total") and not line.endswith(" 0.0")]


def make_store(folder: Path) -> Path:
    """Archives of tensors, of text, of TorchServe's shape; a further version, a spare model, and a workflow."""
    store = folder / "store"
    store.mkdir()
    sums = block("docs/declared-handlers.md", "sums")
    make_archive(store / "sums.mar", sums)
    make_archive(store / "sums-2.mar", sums, name="sums", version="2.0")
    make_archive(store / "shout.mar", block("docs/open-inference.md", "shout"))
    make_archive(store / "echo.mar", ECHO)
    make_archive(store / "spare.mar", ECHO)
    write_war(store / "flow.war", FLOW, NODES)
    return store


def play(folder: Path, entry: str, settings: Mapping[str, str], examples: int) -> Calls:
    """All ports of a server with these settings: `examples` requests of each kind for each operation.

    Asserts what holds afterwards: the server answers, lives, has not grown, and no worker died.
    """
    pytest.importorskip("schemathesis", reason="needs schemathesis, which `make test-long` installs")
    # here: it takes a second, and `make test` collects this file
    from support.described_calls import Calls, with_desired_state, without_desired_state

    store = make_store(folder)
    (folder / "shared").mkdir()
    (folder / "shared" / "region").write_bytes(bytes(64))
    own = {"load_models": "none", "allowed_urls": "file://.*", **settings}
    with Server(folder, entry=entry, store=store, settings=own) as server:
        bring_back(server)
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        calls = Calls(KNOWN, MEMBERS, lambda: bring_back(server), SEED, is_recorded=entry == "torchserve")
        path, method = ("/openapi.json", "GET") if entry == "marserve" else ("/", "OPTIONS")
        documents = {port: server.client.request(method, getattr(server, port) + path).json() for port in PORTS}
        desired = server.client.get(f"{server.management}/desired-state/schema").json()
        before = process.memory_info().rss

        for port in PORTS:
            calls.play(getattr(server, port), without_desired_state(documents[port]), examples)
        bring_back(server)
        predicted_s = quickest_s(lambda: server.predict("sums", '{"pair": [1, 2]}'))
        calls.play(server.management, with_desired_state(documents["management"], desired), examples)
        answered_s = quickest_s(lambda: server.client.get(f"{server.inference}/livez"))

        assert server.process.poll() is None, server.output()[-4000:]
        grown = process.memory_info().rss - before
        sys.stdout.write(
            f"{entry}: {sum(calls.statuses.values())} requests for {calls.operations} operations, seed {SEED}: "
            f"{dict(sorted(calls.statuses.items()))}, grown by {grown >> 10} KiB, then {predicted_s * 1e3:.1f} ms\n"
            f"never answered with success: {', '.join(calls.never_well())}\n"
            f"5xx that are meant: {'; '.join(calls.meant.values())}\n"
        )
        assert not calls.faults, "\n".join(calls.faults.values())
        assert deaths_of(server) == []
        assert grown < MOST_GROWN_BYTES
        assert max(predicted_s, answered_s) < QUICK_S
    return calls


def test_no_described_call_of_a_whole_server_is_answered_wrongly(tmp_path: Path) -> None:
    """With control, shared memory and uploads open, and no keys."""
    settings = {
        "open_inference_control": "true",
        "system_shared_memory_folder": str(tmp_path / "shared"),
        "allow_uploads": "true",
    }

    calls = play(tmp_path, "marserve", settings, examples=30)

    assert sum(calls.statuses.values()) > 10_000
    assert len(calls.never_well()) < 20


def test_no_described_call_of_a_server_as_torchserve_is_answered_wrongly(tmp_path: Path) -> None:
    """The same under TorchServe's command."""
    calls = play(tmp_path, "torchserve", {}, examples=15)

    assert sum(calls.statuses.values()) > 3000
