"""Tests for the Open Inference Protocol's REST routes that change the server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.api.errors import ErrorRules
from marserve.api.open_inference.repository import Repository
from marserve.api.open_inference.server_settings import TRACE, LogSettings
from marserve.api.rest.application import build_app
from marserve.api.rest.platforms.open_inference_control import MAX_BODY, open_inference_control_router
from marserve.api.rest.platforms.open_inference_models import open_inference_models_router
from marserve.desired_state.policies import Changes
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio

LOAD, UNLOAD, LOG, TRACES = (
    "/v2/repository/models/m/load",
    "/v2/repository/models/m/unload",
    "/v2/logging",
    "/v2/trace/setting",
)
CHANGING = [LOAD, UNLOAD, LOG, TRACES, "/v2/models/m/trace/setting"]


class Levels:
    """The level of a log."""

    server = "info"

    def set(self, level: str, model: str | None) -> None:
        """Change it."""
        self.server = level


@asynccontextmanager
async def asking(root: Path, *, is_open: bool = True) -> AsyncIterator[tuple[House, httpx.AsyncClient]]:
    """A store with one archive, and who speaks to an address with these routes."""
    house = House(root)
    (house.store / house.put("m")).rename(house.store / "m.mar")
    repository = Repository(house.registry, Changes(house.registry), enable_model_api=True)
    check_exists = house.registry.data_plane.check_exists
    control = open_inference_control_router(
        repository, LogSettings(Levels(), "", "default"), check_exists, is_open=is_open
    )
    models = open_inference_models_router(house.registry, repository if is_open else None)
    app = build_app([models, control], title="t", error_rules=ErrorRules(as_recorded=False))
    async with client_of(app) as client:
        yield house, client


@pytest.mark.parametrize("path", CHANGING)
async def test_an_address_that_is_not_open_to_changes_names_the_setting(tmp_path: Path, path: str) -> None:
    """Whatever the body is; what is in force is told, and the index has nothing that cannot be loaded there."""
    async with asking(tmp_path, is_open=False) as (house, client):
        for body in (b"", b"{}", b"[", b"x" * (MAX_BODY + 1)):
            answer = await client.post(path, content=body)
            assert (answer.status_code, answer.headers["x-marserve-cause"]) == (403, "control_closed")
            assert "open_inference_control=true" in answer.json()["error"]

        assert house.registry.default_of("m") is None
        assert (await client.get(TRACES)).json() == TRACE
        assert (await client.get(LOG)).json()["log_info"] is True
        assert (await client.post("/v2/repository/index")).json() == []


@pytest.mark.parametrize("path", CHANGING)
@pytest.mark.parametrize(
    "body", [b"[", b"[1]", b'"x"', b"1", b"\xff", b'{"a":' + b"[" * 5000, b" " * MAX_BODY + b"{}", b'{"\xff": 1}']
)
async def test_a_body_that_is_no_object_is_400(tmp_path: Path, path: str, body: bytes) -> None:
    """It says which body is meant, and changes nothing."""
    async with asking(tmp_path) as (house, client):
        if "/models/m/trace" in path:
            await client.post(LOAD)
        answer = await client.post(path, content=body)
        pools = len(house.pools.made)

    assert answer.status_code == 400
    assert answer.json()["error"].startswith("The body of ")
    assert pools == ("/models/m/trace" in path)


async def test_a_model_is_loaded_listed_and_unloaded(tmp_path: Path) -> None:
    """With a body, or without one."""
    async with asking(tmp_path) as (house, client):
        before = (await client.post("/v2/repository/index")).json()
        loaded = await client.post(LOAD)
        index = (await client.post("/v2/repository/index")).json()
        unloaded = await client.post(UNLOAD, json={"parameters": {"unload_dependents": False}})
        after = (await client.post("/v2/repository/index")).json()
        again = await client.post(UNLOAD)

    assert before == [{"name": "m", "version": "", "state": "UNAVAILABLE", "reason": "not loaded"}]
    assert (loaded.status_code, loaded.json(), unloaded.status_code) == (200, {}, 200)
    assert index == [{"name": "m", "version": "1.0", "state": "READY", "reason": ""}]
    assert after == [{"name": "m", "version": "", "state": "UNAVAILABLE", "reason": "unloaded"}]
    assert again.status_code == 404
    assert house.pools.made[0].is_stopped


@pytest.mark.parametrize(
    ("path", "document", "status", "words"),
    [
        (LOAD, {"parameters": {"config": "{}"}}, 400, "Parameter config"),
        (LOAD, {"parameters": {"file:1/model.onnx": "aGk="}}, 400, "file:1/model.onnx"),
        (LOAD, {"parameters": [1]}, 400, '"parameters" in the body of a load'),
        (UNLOAD, {"parameters": {"unload_dependents": 1}}, 400, "unload_dependents"),
        (UNLOAD, {}, 404, "m"),
        ("/v2/repository/models/other/load", {}, 404, "'other'"),
        ("/v2/repository/models/..%2Fm/load", {}, 404, "'../m'"),
        ("/v2/repository/models/%FF/load", {}, 404, "ufffd"),
        (LOG, {"log_file": "/var/x.log"}, 400, "log_file"),
        (TRACES, {"trace_level": ["TIMESTAMPS"]}, 400, "trace_level"),
        ("/v2/models/m/trace/setting", {}, 404, "m"),
    ],
)
async def test_what_cannot_be_is_named(
    tmp_path: Path, path: str, document: dict[str, Any], status: int, words: str
) -> None:
    """Under the protocol's key; nothing is changed."""
    async with asking(tmp_path) as (house, client):
        answer = await client.post(path, json=document)

        assert (answer.status_code, words in answer.json()["error"]) == (status, True)
        assert not house.pools.made


async def test_the_logs_level_is_changed(tmp_path: Path) -> None:
    """The answer has what is in force, as a look at it has."""
    async with asking(tmp_path) as (_, client):
        changed = await client.post(LOG, json={"log_verbose_level": 1})
        looked = await client.get(LOG)

    assert changed.json() == looked.json() == {
        "log_file": "", "log_info": True, "log_warnings": True, "log_errors": True, "log_verbose_level": 1,
        "log_format": "default",
    }  # fmt: skip


async def test_the_traces_of_a_model_are_those_of_the_server(tmp_path: Path) -> None:
    """What is in force may be set again, and cleared."""
    async with asking(tmp_path) as (_, client):
        await client.post(LOAD)
        for answer in (
            await client.get("/v2/models/m/trace/setting"),
            await client.post("/v2/models/m/trace/setting", json={"trace_level": None, "trace_rate": "0"}),
            await client.post(TRACES, json={}),
        ):
            assert (answer.status_code, answer.json()) == (200, TRACE)


WORDS = st.sampled_from(
    ["parameters", "config", "file:x", "unload_dependents", "log_info", "log_file", "log_verbose_level", "log_errors",
     "trace_level", "trace_rate", "trace_file", "ready"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
BODIES = st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
NAMES = st.text(alphabet="m./%é \x00\ud7ff", max_size=8)


@given(st.sampled_from([*CHANGING, "/v2/repository/index"]), BODIES, NAMES)
@settings(max_examples=60)
async def test_any_body_and_any_name_is_answered_or_refused(
    tmp_path_factory: pytest.TempPathFactory, path: str, body: bytes, name: str
) -> None:
    """Never with a 5xx, and no model gets more workers by it than a load gives."""
    async with asking(tmp_path_factory.mktemp("any")) as (house, client):
        for target in (path, path.replace("/m/", f"/{httpx.QueryParams({'n': name})!s}/".replace("n=", ""))):
            answer = await client.post(target, content=body)
            assert answer.status_code < 500
            assert answer.status_code == 200 or answer.json()["error"]
        assert len(house.pools.made) <= 1
        assert not any(pool.held for pool in house.pools.made)
