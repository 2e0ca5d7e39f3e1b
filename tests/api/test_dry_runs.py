"""Dry runs of the calls that register, scale, tune, unregister and set the default, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.answers.management import DryRunStatus
from marserve.api.rest.application import build_app
from marserve.api.rest.models.management import management_router
from marserve.api.rest.models.rollouts import rollout_router
from marserve.desired_state.policies import Changes
from marserve.errors import DesiredStateDecides
from marserve.registry.intake.registration import RegisterParameters
from marserve.rollout.course import read_rollout
from marserve.rollout.rollouts import Rollouts
from support.documents import document_of
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio

CALLS = (
    ("POST", "/models?url=m-3.0.mar"),
    ("PUT", "/models/m?min_worker=2"),
    ("PUT", "/models/m/2.0?batch_size=4"),
    ("PUT", "/models/m/2.0/set-default"),
    ("DELETE", "/models/m/2.0"),
)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with versions 1.0 (the default) and 2.0 of `m`, and the archive of another."""
    house = House(tmp_path)
    house.put("m", "3.0")
    for version in ("1.0", "2.0"):
        await house.registry.register(RegisterParameters(house.put("m", version), initial_workers=1))
    yield house
    await house.registry.stop()
    assert house.folders() == []


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the management listener."""
    async with client_of(house.application()) as client:
        yield client


def dry(path: str, word: str = "true") -> str:
    """The same call as a dry run."""
    return f"{path}{'&' if '?' in path else '?'}dry_run={word}"


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_a_dry_run_says_what_would_be_and_does_nothing(
    house: House, client: httpx.AsyncClient, method: str, path: str
) -> None:
    """Each of the calls; then the call itself does something."""
    before = (await client.get("/models/m/all")).json()

    answer = await client.request(method, dry(path))

    assert answer.status_code == 200, answer.text
    document_of(DryRunStatus, answer.json())
    assert answer.json()["isDryRun"] is True
    assert answer.json()["before"] != answer.json()["after"]
    assert (await client.get("/models/m/all")).json() == before
    assert "isDryRun" not in (await client.request(method, path)).json()
    assert (await client.get("/models/m/all")).json() != before


@pytest.mark.parametrize(("method", "path"), CALLS)
async def test_a_word_that_is_neither_true_nor_false_does_nothing(
    house: House, client: httpx.AsyncClient, method: str, path: str
) -> None:
    """Taken for false it would do what was only to be tried."""
    before = (await client.get("/models/m/all")).json()

    answer = await client.request(method, dry(path, "yes"))

    assert (answer.status_code, answer.json()["message"]) == (400, "dry_run is 'yes'; it must be true or false.")
    assert (await client.get("/models/m/all")).json() == before


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/models?url=gone.mar"),
        ("POST", "/models?url=m-1.0.mar"),
        ("POST", "/models"),
        ("POST", "/models?url=http://origin/m.mar"),
        ("PUT", "/models/m?min_worker=2&max_worker=1"),
        ("PUT", "/models/m/9.0?min_worker=2"),
        ("PUT", "/models/m/2.0?batch_size=0"),
        ("PUT", "/models/n/1.0/set-default"),
        ("DELETE", "/models/m"),
        ("DELETE", "/models/m/9.0"),
        ("DELETE", "/models/n"),
    ],
)
async def test_a_dry_run_is_refused_as_the_call_is(client: httpx.AsyncClient, method: str, path: str) -> None:
    """With the same status and the same words."""
    tried = await client.request(method, dry(path))
    done = await client.request(method, path)

    assert done.status_code >= 400
    assert (tried.status_code, tried.json()) == (done.status_code, done.json())


async def test_a_registration_as_json_can_be_tried(house: House, client: httpx.AsyncClient) -> None:
    """Its parameters are those of the query."""
    answer = await client.post("/models", json={"url": "m-3.0.mar", "initial_workers": 2, "dry_run": True})

    assert answer.json()["after"]["minWorkers"] == 2
    assert len(house.registry.describe_all("m")) == 2


@pytest.mark.parametrize(
    ("query", "more"),
    [
        ("?dry_run=true", {}),
        ("?dry_run=true", {"dry_run": False}),
        ("", {"dry_run": True}),
        ("?dry_run=false", {"dry_run": "true"}),
    ],
)
async def test_parameters_as_json_are_tried_where_either_says_so(
    house: House, client: httpx.AsyncClient, query: str, more: dict[str, Any]
) -> None:
    """The query, or the body: of a registration and of a swap."""
    before = (await client.get("/models/m/all")).json()

    for path in ("/models", "/models/m/swap"):
        answer = await client.post(f"{path}{query}", json={"url": "m-3.0.mar", **more})
        assert (answer.status_code, answer.json().get("isDryRun")) == (200, True), answer.text

    assert (await client.get("/models/m/all")).json() == before


@pytest.mark.parametrize("path", ["/models", "/models/m/swap"])
@pytest.mark.parametrize("name", ["dryrun", "dryRun", "dry-run", "DRY_RUN"])
@pytest.mark.parametrize("in_body", [True, False])
async def test_another_spelling_beside_json_does_nothing(
    house: House, client: httpx.AsyncClient, path: str, name: str, in_body: bool
) -> None:
    """Ignored, it would do what was only to be tried."""
    before = (await client.get("/models/m/all")).json()
    body = {"url": "m-3.0.mar", **({name: True} if in_body else {})}

    answer = await client.post(path, json=body, params={} if in_body else {name: "true"})

    assert (answer.status_code, "did you mean dry_run?" in answer.json()["message"]) == (400, True)
    assert (await client.get("/models/m/all")).json() == before


async def test_scaling_and_batches_of_one_call_are_told_together(client: httpx.AsyncClient) -> None:
    """As the call does both."""
    told = (await client.put("/models/m?min_worker=3&batch_size=4&dry_run=true")).json()

    assert told["after"] == {"batchSize": 4, "maxBatchDelay": 100, "minWorkers": 3, "maxWorkers": 3, "workers": 3}
    assert told["status"].count(". ") == 1


async def test_the_description_names_dry_runs(client: httpx.AsyncClient) -> None:
    """Who does not find them there must not send one: a server that does not know them would do the thing."""
    paths = (await client.options("/")).json()["paths"]

    for method, path in (
        ("post", "/models"),
        ("put", "/models/{model_name}"),
        ("put", "/models/{model_name}/{model_version}"),
        ("put", "/models/{model_name}/{model_version}/set-default"),
        ("delete", "/models/{model_name}"),
        ("delete", "/models/{model_name}/{model_version}"),
    ):
        assert "dry_run" in {each["name"] for each in paths[path][method]["parameters"]}, (method, path)


async def test_where_a_document_decides_a_dry_run_is_refused_as_well(house: House) -> None:
    """It would tell of what nobody may do. So are those of weights, labels, shadows, swaps and roll-outs."""
    changes = Changes(house.registry, refused_by="models.yaml")
    rollouts = Rollouts(house.registry, None)
    app = build_app(
        [
            rollout_router(house.registry, rollouts, lambda call: changes.check(call), changes),
            management_router(house.registry, enable_model_api=True, changes=changes, rollouts=rollouts),
        ],
        title="test",
    )
    bodies: tuple[tuple[str, str, Any], ...] = (
        *((method, path, None) for method, path in CALLS),
        ("PUT", "/models/m/traffic", {"weights": {"1.0": 1}}),
        ("DELETE", "/models/m/traffic", None),
        ("PUT", "/models/m/labels/stable", {"version": "1.0"}),
        ("DELETE", "/models/m/labels/stable", None),
        ("PUT", "/models/m/shadow", {"version": "2.0"}),
        ("DELETE", "/models/m/shadow", None),
        ("POST", "/models/m/swap?url=m-3.0.mar", None),
        ("POST", "/models/m/rollout", {"version": "2.0"}),
    )

    async with client_of(app) as client:
        for method, path, body in bodies:
            answer = await client.request(method, dry(path), json=body)
            assert answer.status_code == 409, (method, path, answer.text)
            assert "models.yaml" in answer.json()["message"]
    with pytest.raises(DesiredStateDecides):
        changes.vet("register a model")


async def test_orders_to_a_roll_out_can_be_tried(house: House) -> None:
    """What each would make of it; what cannot be is refused alike. Calls that touch it say what becomes of it."""
    rollouts = Rollouts(house.registry, None)
    app = build_app(
        [
            rollout_router(house.registry, rollouts),
            management_router(house.registry, enable_model_api=True, rollouts=rollouts),
        ],
        title="test",
    )
    async with client_of(app) as client:
        path = "/models/m/rollout"
        assert (await client.put(f"{path}/pause?dry_run=true")).status_code == 404
        rollouts.begin("m", read_rollout({"version": "2.0"}))
        async with asyncio.timeout(5):
            while rollouts.describe("m")["state"] != "running":
                await asyncio.sleep(0.001)
        told = {order: (await client.put(f"{path}/{order}?dry_run=true")) for order in ("pause", "abort", "promote")}
        resumed = await client.put(f"{path}/resume?dry_run=true")
        deleted = await client.delete(f"{path}?dry_run=true")
        unregistered = await client.delete("/models/m/2.0?force=true&dry_run=true")
        default = await client.put("/models/m/2.0/set-default?dry_run=true")
        state = rollouts.describe("m")["state"]
    await rollouts.stop()

    assert state == "running"
    assert {order: answer.json()["after"] for order, answer in told.items()} == {
        "pause": {"state": "paused", "share": 5.0},
        "abort": {"state": "aborted", "share": 0.0},
        "promote": {"state": "promoted", "share": 100.0},
    }
    assert deleted.json()["after"]["state"] == "aborted"
    assert (resumed.status_code, "is not paused" in resumed.json()["message"]) == (409, True)
    assert "the roll-out of version 2.0 would be aborted, for it needs version 2.0" in unregistered.json()["notes"]
    assert any("makes it the default if it is promoted" in note for note in default.json()["notes"])
