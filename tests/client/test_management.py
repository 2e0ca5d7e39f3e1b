"""What the calls of the management API send, and how their answers are read."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marserve.api.parameters import REGISTER_PARAMETERS, SCALE_PARAMETERS, SWAP_PARAMETERS, UNREGISTER_PARAMETERS
from marserve_client import BadAnswer, BadInput, Conflict
from support.both_clients import Asking, Clients
from support.scripted_server import Asked, answer, scripted

DONE = b'{"status": "done"}'
Call = Callable[[Asking], Any]

CALLS: dict[str, tuple[Call, str, dict[str, Any] | None]] = {
    "register": (
        lambda c: c.register("m.mar", model_name="m", initial_workers=2, batch_size=4),
        "POST /models",
        {"batch_size": 4, "url": "m.mar", "model_name": "m", "initial_workers": 2, "synchronous": True},
    ),
    "register dry": (
        lambda c: c.register("m.mar", synchronous=False, dry_run=True),
        "POST /models?dry_run=true",
        {"url": "m.mar", "synchronous": False},
    ),
    "swap": (
        lambda c: c.swap("m", "m2.mar", version="1.0", order="load_first", keep_old=True),
        "POST /models/m/swap",
        {"url": "m2.mar", "version": "1.0", "order": "load_first", "keep_old": True, "check": True},
    ),
    "unregister": (lambda c: c.unregister("m"), "DELETE /models/m", None),
    "unregister one": (
        lambda c: c.unregister("m", version="1.0", force=True),
        "DELETE /models/m/1.0?force=true",
        None,
    ),
    "scale": (lambda c: c.scale("m", 1, 3), "PUT /models/m?min_worker=1&max_worker=3&synchronous=true", None),
    "scale one": (
        lambda c: c.scale("m", version="1.0", batch_size=8, max_batch_delay=5, synchronous=False),
        "PUT /models/m/1.0?batch_size=8&max_batch_delay=5&synchronous=false",
        None,
    ),
    "default": (lambda c: c.set_default("m", "2.0"), "PUT /models/m/2.0/set-default", None),
    "traffic": (lambda c: c.traffic("m"), "GET /models/m/traffic", None),
    "weights": (
        lambda c: c.set_traffic("m", {"1.0": 90, "2.0": 10}, sticky={"header": "x-user"}),
        "PUT /models/m/traffic",
        {"weights": {"1.0": 90, "2.0": 10}, "sticky": {"header": "x-user"}},
    ),
    "no weights": (lambda c: c.reset_traffic("m", dry_run=True), "DELETE /models/m/traffic?dry_run=true", None),
    "rollout": (lambda c: c.rollout("m"), "GET /models/m/rollout", None),
    "rollout begun": (
        lambda c: c.begin_rollout("m", "2.0", steps=[50, 100], hold=1),
        "POST /models/m/rollout",
        {"steps": [50, 100], "hold": 1, "version": "2.0"},
    ),
    "rollout paused": (lambda c: c.order_rollout("m", "pause"), "PUT /models/m/rollout/pause", None),
}


def asked_by(clients: Clients, call: Call) -> Asked:
    """What a call sends."""
    with scripted(answer(200, DONE)) as server:
        assert call(clients(management=server.address)) == {"status": "done"}
        return server.asked[0]


@pytest.mark.parametrize("name", CALLS)
def test_each_call_sends_what_its_route_reads(clients: Clients, name: str) -> None:
    """Method, path, query and body; what is None is left out."""
    call, line, body = CALLS[name]

    asked = asked_by(clients, call)

    assert asked.line == f"{line} HTTP/1.1"
    assert (json.loads(asked.body) if asked.body else None) == body


def test_the_arguments_are_the_routes_parameters() -> None:
    """The API takes each of them by that name."""
    assert {"model_name", "initial_workers", "synchronous", "dry_run"} <= set(REGISTER_PARAMETERS)
    assert {"version", "order", "keep_old", "check"} <= set(SWAP_PARAMETERS)
    assert {"min_worker", "max_worker", "batch_size", "max_batch_delay", "synchronous"} <= set(SCALE_PARAMETERS)
    assert {"force", "dry_run"} <= set(UNREGISTER_PARAMETERS)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.scale("m"), "scale: needs min_worker"),
        (lambda c: c.describe("m", customized=True), "customized: asks the handler of one version"),
        (lambda c: c.set_default("m", ".."), "name: '..' names no"),
        (lambda c: c.begin_rollout("m", "2", steps={1}), "body: cannot be written as JSON"),
        (lambda c: c.upload("not-there.mar"), "file: not-there.mar cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused_here(clients: Clients, call: Call, words: str) -> None:
    """Nothing is sent."""
    with scripted() as server:
        with pytest.raises(BadInput, match=f"^{words}"):
            call(clients(management=server.address))

        assert not server.asked


@pytest.mark.parametrize(("status", "begun", "partial"), [(200, False, False), (202, True, False), (206, False, True)])
def test_an_answer_says_whether_it_is_done(clients: Clients, status: int, begun: bool, partial: bool) -> None:
    """Wholly, not yet, or in part."""
    with scripted(answer(status, DONE, x_request_id="r-1")) as server:
        came = clients(management=server.address).register("m.mar")

    assert (came.is_begun, came.is_partial, came.request_id, dict(came)) == (begun, partial, "r-1", {"status": "done"})


def test_all_pages_of_models_are_read(clients: Clients) -> None:
    """One after another."""
    pages = [
        {"nextPageToken": "2", "models": [{"modelName": "a", "modelUrl": "a.mar"}]},
        {"models": [{"modelName": "b", "modelUrl": "b.mar"}]},
    ]
    with scripted(*[answer(200, json.dumps(page).encode()) for page in pages]) as server:
        assert clients(management=server.address).models() == {"a": "a.mar", "b": "b.mar"}

    assert [asked.line.split()[1] for asked in server.asked] == [
        "/models?limit=100",
        "/models?limit=100&next_page_token=2",
    ]


@pytest.mark.parametrize("page", [b"{}", b'{"models": [3]}', b'{"models": [{}]}', b'{"models": 3}'])
def test_a_page_of_another_form_is_a_bad_answer(clients: Clients, page: bytes) -> None:
    """And no loop without end."""
    with scripted(answer(200, page)) as server, pytest.raises(BadAnswer, match="no list of models"):
        clients(management=server.address).models()


def test_pages_that_repeat_end(clients: Clients) -> None:
    """A server that names the same page again is not asked for ever."""
    page = b'{"nextPageToken": "1", "models": [{"modelName": "a"}]}'
    with scripted(*[answer(200, page)] * 9) as server:
        assert clients(management=server.address).models() == {"a": ""}

        assert len(server.asked) == 2


def test_an_archive_is_sent_with_its_length_and_digest(clients: Clients, tmp_path: Path) -> None:
    """Piece by piece, under its own name or another one; a refusal is tried again from its beginning."""
    content = bytes(range(256)) * 4000
    file = tmp_path / "m.mar"
    file.write_bytes(content)
    full = answer(503, b"{}", retry_after="0")
    with scripted(full, answer(201, b'{"archive": "m.mar"}'), answer(200, b'{"archive": "n.mar"}')) as server:
        client = clients(management=server.address)
        assert client.upload(file) == {"archive": "m.mar"}
        client.upload(str(file), name="n.mar", replace=True, dry_run=True)

    lines = [asked.line.split(" ", 1)[1] for asked in server.asked]
    assert lines == [
        f"{path} HTTP/1.1"
        for path in ("/archives/m.mar", "/archives/m.mar", "/archives/n.mar?replace=true&dry_run=true")
    ]
    digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
    for asked in server.asked:
        assert asked.body == content
        assert asked.headers["digest"] == f"sha-256={digest}"
        assert "transfer-encoding" not in asked.headers


def test_an_upload_that_is_refused_says_why(clients: Clients, tmp_path: Path) -> None:
    """In the server's words."""
    file = tmp_path / "m.mar"
    file.write_bytes(b"PK")
    refused = b'{"code": 409, "type": "ConflictStatusException", "message": "Other content is there."}'
    with scripted(answer(409, refused)) as server, pytest.raises(Conflict, match="Other content is there"):
        clients(management=server.address).upload(file)


def test_a_list_of_versions_is_described(clients: Clients) -> None:
    """All, one, the default one with the handler's own words."""
    with scripted(*[answer(200, b'[{"modelName": "m"}]')] * 3) as server:
        client = clients(management=server.address)
        assert client.describe("m") == [{"modelName": "m"}]
        client.describe("m", version="1.0")
        client.describe("m", version=None, customized=True, timeout=5)

    assert [asked.line.split()[1] for asked in server.asked] == [
        "/models/m/all",
        "/models/m/1.0",
        "/models/m?customized=true",
    ]
    assert server.asked[2].headers["x-marserve-timeout-ms"] == "5000"
