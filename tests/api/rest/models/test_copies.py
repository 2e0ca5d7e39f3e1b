"""Copies of versions over HTTP: registered to be measured, and of no document or snapshot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.answers.management import ModelDescription
from marserve.api.rest.application import build_app
from marserve.api.rest.models.management import management_router
from marserve.desired_state.policies import Changes
from support.documents import document_of
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio

COPY = {"copy_of": "m", "model_name": "m-copy"}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with a store and a model in two versions; stopped in the end, with nothing left."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    async with client_of(house.application()) as client:
        for version in ("1.0", "2.0"):
            url = house.put(version=version)
            answer = await client.post("/models", params={"url": url, "batch_size": 4, "initial_workers": 1})
            assert answer.status_code == 200
    yield house
    await house.registry.stop()
    assert house.folders() == []


@pytest.fixture
async def governed(house: House) -> AsyncIterator[httpx.AsyncClient]:
    """Who speaks to the management listener of a server whose models a document alone says."""
    changes = Changes(house.registry, refused_by="models.yaml")
    app = build_app([management_router(house.registry, enable_model_api=True, changes=changes)], title="test")
    async with client_of(app) as client:
        yield client


async def _describe(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    answer = await client.get(path)
    document_of(list[ModelDescription], answer.content)
    described: dict[str, Any] = answer.json()[0]
    return described


async def test_a_copy_is_as_the_version_is_now_but_for_what_it_is_told(
    house: House, governed: httpx.AsyncClient
) -> None:
    """Its threads and padding, its number of workers, and its name."""
    words: dict[str, str | int | float] = {
        **COPY,
        "model_version": "2.0",
        "threads": 3,
        "padding_budget": 0.5,
        "initial_workers": 2,
    }

    answer = await governed.post("/models", params=words)

    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "Model m-copy version 2.0 is registered, with 2 workers"
    described = await _describe(governed, "/models/m-copy")
    assert (described["copyOf"], described["modelVersion"], described["modelUrl"]) == ("m", "2.0", "m-2.0.mar")
    assert (described["minWorkers"], described["maxWorkers"], described["batchSize"]) == (2, 2, 4)
    assert "declared" not in described
    pool = house.pools.made[-1]
    assert (pool.load.threads, pool.options.padding_budget) == (3, 0.5)


async def test_where_a_document_decides_copies_are_changed_and_nothing_else(governed: httpx.AsyncClient) -> None:
    """The calls that change a model go to its copy alone."""
    assert (await governed.post("/models", params=COPY)).status_code == 200
    change: dict[str, str | int] = {"batch_size": 16, "min_worker": 3}

    assert (await governed.put("/models/m", params=change)).status_code == 409
    assert (await governed.put("/models/m-copy", params=change)).status_code in (200, 202)
    described = await _describe(governed, "/models/m-copy")
    assert (described["batchSize"], described["minWorkers"]) == (16, 3)
    assert (await governed.delete("/models/m/1.0")).status_code == 409
    assert (await governed.delete("/models/m-copy")).status_code == 200
    assert (await governed.get("/models/m-copy")).status_code == 404


async def test_snapshots_and_documents_have_no_copies(house: House, governed: httpx.AsyncClient) -> None:
    """Else a restart, or the next change of the document, would bring one, or take it away."""
    changes, snapshot, actual = house.changes, house.registry.snapshot(), house.registry.actual()

    await governed.post("/models", params=COPY)

    assert house.registry.snapshot() == snapshot
    assert house.registry.actual() == actual
    assert house.changes == changes


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ({"copy_of": "m"}, 400, "A copy needs copy_of, the model, and model_name, its own name."),
        ({**COPY, "copy_of": "n"}, 404, "Model not found: n"),
        ({**COPY, "model_version": "9"}, 404, "9"),
        ({**COPY, "model_name": "m"}, 409, "m is a model, and no copy of one"),
        ({**COPY, "threads": "0"}, 400, "threads is 0; it must be a whole number from 1 to 1024."),
        ({**COPY, "threads": "many"}, 400, "threads is 'many'"),
        ({**COPY, "padding_budget": "1.5"}, 400, "padding_budget is '1.5'; it must be a number from 0 to below 1."),
        ({**COPY, "padding_budget": "much"}, 400, "padding_budget is 'much'; it must be a number."),
        ({**COPY, "initial_workers": "-2"}, 400, "initial_workers is -2"),
        ({**COPY, "url": "m-1.0.mar"}, 400, "url is not of a copy"),
        ({**COPY, "dry_run": "true"}, 400, "dry_run is not of a copy"),
    ],
)
async def test_what_is_no_copy_is_refused_and_leaves_nothing(
    house: House, governed: httpx.AsyncClient, words: dict[str, str], status: int, said: str
) -> None:
    """With the value, and what it must be."""
    before = house.registry.actual()

    answer = await governed.post("/models", params=words)

    assert (answer.status_code, said in answer.json()["message"]) == (status, True), answer.text
    assert house.registry.actual() == before
    assert (await governed.get("/models/m-copy")).status_code == 404


async def test_one_version_has_one_copy_under_a_name_and_another_version_may_have_it_too(
    governed: httpx.AsyncClient,
) -> None:
    """As versions of a model."""
    assert (await governed.post("/models", params={**COPY, "model_version": "1.0"})).status_code == 200
    assert (await governed.post("/models", params={**COPY, "model_version": "1.0"})).status_code == 409
    assert (await governed.post("/models", json={**COPY, "model_version": "2.0", "threads": 1})).status_code == 200
