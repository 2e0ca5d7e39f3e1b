"""Tests for the Open Inference Protocol's REST routes about shared memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.api.errors import ErrorRules
from marserve.api.open_inference.regions import Regions
from marserve.api.rest.application import build_app
from marserve.api.rest.platforms.open_inference_control import MAX_BODY
from marserve.api.rest.platforms.shared_memory import shared_memory_router
from support.management_house import client_of

pytestmark = pytest.mark.anyio

SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
GOOD = {"key": "/a", "byte_size": 10}


@asynccontextmanager
async def asking(root: Path, *, is_open: bool = True, is_on: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """Who speaks to an address with these routes; the folder has a file of 100 bytes."""
    (root / "a").write_bytes(bytes(100))
    regions = Regions(root if is_on else None, most_bytes=200, most_regions=2)
    app = build_app(
        [shared_memory_router(regions, is_open=is_open)], title="t", error_rules=ErrorRules(as_recorded=False)
    )
    async with client_of(app) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    [f"{SYSTEM}/region/r/register", f"{SYSTEM}/region/r/unregister", f"{SYSTEM}/unregister", f"{CUDA}/unregister"],
)
async def test_an_address_that_is_not_open_to_changes_names_the_setting(tmp_path: Path, path: str) -> None:
    """What is registered is shown."""
    async with asking(tmp_path, is_open=False) as client:
        answer = await client.post(path, json=GOOD)
        shown = await client.get(f"{SYSTEM}/status")

    assert (answer.status_code, answer.headers["x-marserve-cause"]) == (403, "control_closed")
    assert "open_inference_control=true" in answer.json()["error"]
    assert (shown.status_code, shown.json()) == (200, [])


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "Parameter key is missing"),
        ({**GOOD, "key": "../a"}, "Parameter key is '../a'"),
        ({**GOOD, "key": "/etc/passwd"}, "Parameter key is '/etc/passwd'"),
        ({**GOOD, "key": "none"}, "cannot open a file of that name"),
        ({"key": "a"}, "Parameter byte_size is missing"),
        ({**GOOD, "offset": -1}, "Parameter offset is -1"),
        ({**GOOD, "offset": 91}, "end at 101, and the file '/a' has 100 bytes"),
        ({**GOOD, "byte_size": 1 << 62}, "system_shared_memory_size"),
        ([], "The body of a registration of shared memory must be a JSON object"),
    ],
)
async def test_what_cannot_be_registered_is_named(tmp_path: Path, document: Any, words: str) -> None:
    """Under the protocol's key; nothing is registered."""
    async with asking(tmp_path) as client:
        answer = await client.post(f"{SYSTEM}/region/r/register", json=document)
        shown = await client.get(f"{SYSTEM}/status")

    assert (answer.status_code, words in answer.json()["error"]) == (400, True)
    assert shown.json() == []


async def test_a_region_that_is_not_registered_is_not_shown(tmp_path: Path) -> None:
    """It is 400, as Triton's; unregistered it is already. A server that takes none names the setting."""
    async with asking(tmp_path, is_on=False) as client:
        shown = await client.get(f"{SYSTEM}/region/r/status")
        unregistered = await client.post(f"{SYSTEM}/region/r/unregister")
        registered = await client.post(f"{SYSTEM}/region/r/register", json=GOOD)

    assert (shown.status_code, "'r'" in shown.json()["error"]) == (400, True)
    assert unregistered.status_code == 200
    assert (registered.status_code, "system_shared_memory_folder" in registered.json()["error"]) == (400, True)


async def test_regions_are_registered_shown_and_unregistered(tmp_path: Path) -> None:
    """One by one, and all of them; a name may have slashes, written either way."""
    async with asking(tmp_path) as client:
        first = await client.post(f"{SYSTEM}/region/r/register", json={**GOOD, "offset": 4})
        second = await client.post(f"{SYSTEM}/region/my/s%20%C3%A9/register", json=GOOD)
        again = await client.post(f"{SYSTEM}/region/r/register", json=GOOD)
        shown = (await client.get(f"{SYSTEM}/status")).json()
        one = (await client.get(f"{SYSTEM}/region/my%2Fs%20%C3%A9/status")).json()
        gone = await client.post(f"{SYSTEM}/region/r/unregister")
        left = (await client.get(f"{SYSTEM}/status")).json()
        await client.post(f"{SYSTEM}/unregister", content=b"")
        none = (await client.get(f"{SYSTEM}/status")).json()

    other = {"name": "my/s é", "key": "/a", "offset": 0, "byte_size": 10}
    assert (first.status_code, first.json(), second.status_code, gone.status_code) == (200, {}, 200, 200)
    assert (again.status_code, "the name 'r' is registered" in again.json()["error"]) == (400, True)
    assert shown == [{"name": "r", "key": "/a", "offset": 4, "byte_size": 10}, other]
    assert (one, left, none) == ([other], [other], [])


async def test_memory_of_cuda_devices_is_not_taken(tmp_path: Path) -> None:
    """Its status is empty, and a registration is told why."""
    async with asking(tmp_path) as client:
        shown = await client.get(f"{CUDA}/status")
        one = await client.get(f"{CUDA}/region/r/status")
        register = await client.post(
            f"{CUDA}/region/r/register", json={"raw_handle": {"b64": ""}, "device_id": 0, "byte_size": 1}
        )
        gone = [await client.post(f"{CUDA}{end}") for end in ("/unregister", "/region/r/unregister")]

    assert (shown.status_code, shown.json()) == (200, [])
    assert (one.status_code, register.status_code) == (400, 400)
    assert "takes no CUDA shared memory" in register.json()["error"]
    assert [answer.status_code for answer in gone] == [200, 200]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
DOCUMENTS = st.fixed_dictionaries({}, optional=dict.fromkeys(("key", "offset", "byte_size"), JSON)) | JSON
BODIES = st.binary(max_size=200) | DOCUMENTS.map(lambda value: json.dumps(value).encode())


@given(st.sampled_from([SYSTEM, CUDA]), st.text(max_size=300), BODIES | st.just(b" " * MAX_BODY + b"{}"))
@settings(max_examples=60)
async def test_any_name_and_any_body_is_answered_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: str, name: str, body: bytes
) -> None:
    """Never with a 5xx."""
    async with asking(tmp_path_factory.mktemp("any")) as client:
        quoted = f"/{quote(name, errors='surrogatepass')}"
        for end in ("register", "unregister"):
            answer = await client.post(f"{at}/region{quoted}/{end}", content=body)
            assert answer.status_code < 500
        assert (await client.get(f"{at}/region{quoted}/status")).status_code < 500
