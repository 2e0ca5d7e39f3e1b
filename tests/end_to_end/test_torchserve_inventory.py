"""A walk of what TorchServe answers: every route, every member of a description, every header that has a meaning.

One server with every API on; the lists are the inventory's, each entry is a test.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.inventory import inventory
from support.server import Server, make_archive
from support.workflow_archives import write_war

ECHO = """\
def handle(data, context):
    if not data:
        return data
    headers = context.get_all_request_header(0)
    context.set_response_header(0, "ts_request_sequence_id", "s1")
    context.set_response_content_type(0, "application/x-walk+json")
    return [{"headers": dict(headers), "rows": len(data)}]
"""
PLAIN = "def handle(data, context):\n    return [bytes(row.get('body') or b'') for row in data or []]\n"
SPEC = "models:\n  middle:\n    url: middle.mar\ndag:\n  prepare: [middle]\n"
ROUTES = inventory("routes")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of two versions, a workflow, keys off, model control and the Open Inference routes on."""
    folder = tmp_path_factory.mktemp("walk")
    store = folder / "store"
    store.mkdir()
    make_archive(store / "echo.mar", ECHO)
    make_archive(store / "second.mar", ECHO, name="echo", version="2.0")
    make_archive(store / "middle.mar", PLAIN)
    write_war(store / "w.war", SPEC, "def prepare(data, context):\n    return data and [b'x' for row in data]\n")
    settings = {"ts_open_inference_protocol": "true", "load_models": "echo.mar", "default_workers_per_model": "1"}
    with Server(folder, store=store, settings=settings) as server:
        assert server.register("second.mar").status_code == 200
        assert server.client.post(f"{server.management}/workflows", params={"url": "w.war"}).status_code == 200
        yield server


def ask(server: Server, route: dict[str, Any]) -> httpx.Response:
    """One request to a route, of what is there."""
    base = {"management": server.management, "metrics": server.metrics}.get(route["api"], server.inference)
    method = "POST" if route["method"] == "ANY" and "predict" in route["path"] else route["method"]
    method = "GET" if method == "ANY" else method
    values = {
        "model_name": "echo",
        "model_version": "1.0",
        "url_path": "some/path",
        "workflow_name": "w",
        "any": "infer",
    }
    params: dict[str, str] = {}
    if method == "DELETE" and route["path"].startswith("/models"):
        assert server.register("echo.mar", model_name="gone").status_code == 200
        values["model_name"] = "gone"
    if method == "DELETE" and route["path"].startswith("/workflows"):
        created = server.client.post(f"{server.management}/workflows", params={"url": "w.war", "workflow_name": "gone"})
        assert created.status_code == 200, created.text
        values["workflow_name"] = "gone"
    if method == "POST" and route["path"] == "/models":
        params = {"url": "echo.mar", "model_name": f"new_{uuid.uuid4().hex}"}
    if method == "POST" and route["path"] == "/workflows":
        params = {"url": "w.war", "workflow_name": f"new_{uuid.uuid4().hex}"}
    if method == "PUT" and not route["path"].endswith("set-default"):
        params = {"min_worker": "1", "synchronous": "true"}
    path = re.sub(r"\{(\w+)\}", lambda found: values[found[1]], route["path"])
    return server.client.request(method, base + path, params=params, content=b"x" if method == "POST" else None)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route['api']}-{route['method']}-{route['path']}")
def test_every_route_answers_as_one_that_is_there(server: Server, route: dict[str, Any]) -> None:
    """With a status that TorchServe has for it, and the members that its answer has."""
    if route.get("only_if") == "tokens enabled":
        # Keys are off: TorchServe has no such route then, and neither is there one here.
        assert ask(server, route).status_code == 404
        return

    answer = ask(server, route)

    assert answer.status_code in route["statuses"], answer.text
    if answer.status_code >= 400 and route["api"] != "open-inference":
        assert answer.json()["type"] not in ("ResourceNotFoundException", "MethodNotAllowedException"), answer.text
    members = {"extenstion": "extensions"}  # spelled right here
    if answer.status_code == 200 and "body_keys" in route:
        wanted = {members.get(name, name) for name in route["body_keys"]} - {"nextPageToken"}
        assert wanted <= answer.json().keys()
    if "content_type" in route:
        assert answer.headers["content-type"] == route["content_type"]
    if answer.status_code == 200 and isinstance(route.get("body"), dict):
        assert answer.json() == route["body"]


# Members that are there only where they have something to say, and where that is tested.
ONLY_SOMETIMES = {
    "parallelType": "tests/registry/catalogue/test_describe.py",
    "deviceIds": "tests/registry/catalogue/test_describe.py",
    "customizedMetadata": "tests/registry/catalogue/test_describe.py",
}


@pytest.mark.parametrize("name", inventory("describe_keys"))
def test_every_member_of_a_description_is_there(server: Server, name: str) -> None:
    """Of a plain model; some only with what they describe."""
    if name in ONLY_SOMETIMES:
        file = Path(__file__).parents[2] / ONLY_SOMETIMES[name]
        assert name in file.read_text("utf-8")
        return

    assert name in server.describe("echo")


@pytest.mark.parametrize("name", inventory("describe_worker_keys"))
def test_every_member_of_a_described_worker_is_there(server: Server, name: str) -> None:
    """Of one that is ready."""
    assert name in server.describe("echo")["workers"][0]


@pytest.mark.parametrize("name", inventory("response_headers"))
def test_every_header_of_torchserves_answers_is_there(server: Server, name: str) -> None:
    """With its value, on predictions and on errors; these keep the connection, for clients that ask again."""
    value = inventory("response_headers")[name]
    for answer in (server.predict("echo", b"x"), server.predict("nowhere", b"x")):
        assert name.lower() in answer.headers
        if name == "x-request-id":
            assert uuid.UUID(answer.headers[name])
        elif name == "connection":
            assert answer.headers[name] == "keep-alive"
        else:
            assert answer.headers[name] == value


SEQUENCES = {f"ts_request_sequence_{part}" for part in ("id", "start", "end")}
# Request headers that are the server's own to set: what a client says of them does not reach the handler.
SET_BY_THE_SERVER = {"explain": "False", "describe": None, "url_path": ""}


@pytest.mark.parametrize("name", inventory("special_request_headers"))
def test_every_request_header_with_a_meaning_has_it(server: Server, name: str) -> None:
    """Keys are checked, sequences reach the handler, and what the server sets cannot be set by clients."""
    answer = server.predict("echo", b"x", **{name: "True"})

    seen = answer.json()["headers"]
    if name in SET_BY_THE_SERVER:
        assert seen.get(name) == SET_BY_THE_SERVER[name]
    else:
        assert name in SEQUENCES | {"Authorization"}
        assert {key.lower(): value for key, value in seen.items()}[name.lower()] == "True"


@pytest.mark.parametrize("name", inventory("special_response_headers"))
def test_every_response_header_with_a_meaning_has_it(server: Server, name: str) -> None:
    """Those of a plain answer here; those of streams and of a sequence's end in the tests of streams."""
    if name in ("ts_stream_next", "ts_request_sequence_end"):
        folder = Path(__file__).parents[1]
        files = [
            *folder.glob("*/test_*stream*.py"),
            *folder.glob("*/test_*sequence*.py"),
            *folder.glob("*/test_cont*.py"),
        ]
        assert any(name in file.read_text("utf-8") for file in files)
        return

    answer = server.predict("echo", b"x")

    wanted = {"content-type": "application/x-walk+json", "ts_request_sequence_id": "s1"}
    assert answer.headers[name] == wanted[name]
    assert json.loads(answer.content)["rows"] == 1
