"""Tests for traffic, labels and swaps over HTTP: shapes, statuses, sentences."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.answers.management import SwapStatus
from marserve.api.rest.schemas import LabelStatus, TrafficStatus
from marserve.registry.intake.registration import RegisterParameters
from support.documents import document_of
from support.fake_pool import Behaviour
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with versions 1.0 (the default) and 2.0 of `m`."""
    house = House(tmp_path)
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


# ------------------------------------------------------------------------------------------- weights


async def test_weights_are_put_told_and_deleted_in_one_shape(client: httpx.AsyncClient) -> None:
    """What `GET` tells can be put again."""
    body = {"weights": {"1.0": 80, "2.0": 20}, "sticky": {"header": "X-User"}}

    put = await client.put("/models/m/traffic", json=body)
    told = await client.get("/models/m/traffic")

    assert (put.status_code, put.json(), told.json()) == (200, body, body)
    TrafficStatus.model_validate(told.json())
    assert (await client.put("/models/m/traffic", json=told.json())).json() == body

    deleted = await client.delete("/models/m/traffic")
    assert (deleted.status_code, deleted.json()) == (200, {"weights": {"1.0": 100}, "isDefault": True})
    assert (await client.get("/models/m/traffic")).json() == deleted.json()
    again = await client.put("/models/m/traffic", json=deleted.json())
    assert again.json() == {"weights": {"1.0": 100}}


async def test_a_weight_of_a_version_that_is_not_ready_is_told_as_pending(
    house: House, client: httpx.AsyncClient
) -> None:
    """And what was told can be put again all the same."""
    house.pools.of("m", "2.0").scale(0, 0)

    told = await client.put("/models/m/traffic", json={"weights": {"1.0": 1, "2.0": 1}})

    assert told.json() == {"weights": {"1.0": 1, "2.0": 1}, "pending": ["2.0"]}
    TrafficStatus.model_validate(told.json())
    assert (await client.put("/models/m/traffic", json=told.json())).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/models/n/traffic", b'{"weights": {"1.0": 1}}', 404, "Model not found: n"),
        ("/models/m/traffic", b'{"weights": {"3.0": 1}}', 404, "Model version: 3.0 does not exist for model: m"),
        ("/models/m/traffic", b"", 400, "The body is not valid JSON."),
        ("/models/m/traffic", b"{", 400, "The body is not valid JSON."),
        ("/models/m/traffic", b"\xff", 400, "The body is not valid JSON."),
        ("/models/m/traffic", b"[1]", 400, "The body must be a JSON object."),
        ("/models/m/traffic", b"[" * 100_000, 400, "The body is not valid JSON."),
        ("/models/m/traffic", b'{"weights": {"1.0": 1, "1.0": 2}}', 400, "'1.0' stands in the body more than once."),
        ("/models/m/traffic", b'{"weights": {"1.0": NaN}}', 400, "The weight of version 1.0 is nan"),
        ("/models/m/traffic", b'{"weights": {"1.0": 0}}', 400, "The weights are all 0"),
        ("/models/m/traffic", b'{"wieghts": {"1.0": 1}}', 400, "Did you mean weights?"),
        (
            "/models/m/traffic?dry_run=yes",
            b'{"weights": {"1.0": 1}}',
            400,
            "dry_run is 'yes'; it must be true or false",
        ),
        ("/models/m/traffic?dryRun=true", b'{"weights": {"1.0": 1}}', 400, "did you mean dry_run?"),
        ("/models/m/labels/canary", b'{"version": 2.0}', 400, "A label is put with the version"),
        ("/models/m/labels/canary", b'{"version": "2.0", "x": 1}', 400, "A label is put with the version"),
        ("/models/m/labels/canary", b'{"version": "3.0"}', 404, "Model version: 3.0 does not exist"),
        ("/models/m/labels/1.0", b'{"version": "2.0"}', 400, "'1.0' cannot be a label"),
        ("/models/n/labels/canary", b'{"version": "2.0"}', 404, "Model not found: n"),
    ],
)
async def test_what_cannot_be_meant_is_refused(
    client: httpx.AsyncClient, path: str, body: bytes, status: int, words: str
) -> None:
    """With a sentence, and nothing is changed."""
    answer = await client.put(path, content=body)

    assert answer.status_code == status
    assert words in answer.json()["message"]
    assert (await client.get("/models/m/traffic")).json() == {"weights": {"1.0": 100}, "isDefault": True}
    assert (await client.get("/models/m/labels")).json() == {}


async def test_a_dry_run_changes_nothing(client: httpx.AsyncClient) -> None:
    """Of each call that changes something."""
    put = await client.put("/models/m/traffic?dry_run=true", json={"weights": {"2.0": 1}})
    label = await client.put("/models/m/labels/canary?dry_run=true", json={"version": "2.0"})

    assert put.json() == {"weights": {"2.0": 1}}
    assert label.json() == {"version": "2.0"}
    assert (await client.get("/models/m/traffic")).json()["isDefault"] is True
    assert (await client.get("/models/m/labels")).json() == {}


async def test_the_default_says_that_weights_decide(client: httpx.AsyncClient) -> None:
    """TorchServe's sentence alone would promise what does not come."""
    plain = (await client.put("/models/m/2.0/set-default")).json()["status"]
    await client.put("/models/m/traffic", json={"weights": {"1.0": 1}})
    told = (await client.put("/models/m/2.0/set-default")).json()["status"]

    assert plain == 'Default version successfully updated for model "m" to "2.0"'
    assert told == f"{plain}. Its traffic goes by weights until they are deleted."


async def test_a_version_with_a_weight_is_unregistered_by_force_only(client: httpx.AsyncClient) -> None:
    """409 otherwise, with the next step."""
    await client.put("/models/m/traffic", json={"weights": {"1.0": 1, "2.0": 1}})

    refused = await client.delete("/models/m/2.0")
    assert (refused.status_code, refused.headers["x-marserve-cause"]) == (409, "version_in_use")
    assert "unregister it with force=true" in refused.json()["message"]

    assert (await client.delete("/models/m/2.0?force=true")).status_code == 200
    assert (await client.get("/models/m/traffic")).json() == {"weights": {"1.0": 1}}


# ------------------------------------------------------------------------------------------- labels


async def test_labels_are_put_told_and_deleted(client: httpx.AsyncClient) -> None:
    """Each is an object, so that more can be told of it."""
    put = await client.put("/models/m/labels/canary", json={"version": "2.0"})
    await client.put("/models/m/labels/stable", json={"version": "1.0"})

    assert (put.status_code, put.json()) == (200, {"version": "2.0"})
    told = (await client.get("/models/m/labels")).json()
    assert told == {"canary": {"version": "2.0"}, "stable": {"version": "1.0"}}
    for each in told.values():
        LabelStatus.model_validate(each)
    assert (await client.get("/models/m/canary")).json()[0]["modelVersion"] == "2.0"

    assert (await client.delete("/models/m/labels/canary")).json() == {"status": 'Label "canary" of model "m" removed'}
    gone = await client.delete("/models/m/labels/canary")
    assert (gone.status_code, gone.json()["message"]) == (404, "Model m has no label canary.")


async def test_a_path_of_traffic_is_never_a_version(house: House, client: httpx.AsyncClient) -> None:
    """A version of that name is reached by `model_version`, and serves like any other."""
    await house.registry.register(RegisterParameters(house.put("m", "traffic"), initial_workers=0))

    assert "weights" in (await client.get("/models/m/traffic")).json()
    described = await client.get("/models/m?model_version=traffic")
    assert described.json()[0]["modelVersion"] == "traffic"
    scaled = await client.put("/models/m?model_version=traffic&min_worker=1&synchronous=true")
    assert scaled.status_code == 200
    assert (await client.delete("/models/m?model_version=traffic")).status_code == 200
    assert len((await client.get("/models/m/all")).json()) == 2


# ------------------------------------------------------------------------------------------- swaps


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_swap_tells_what_took_whose_place(house: House, client: httpx.AsyncClient, as_json: bool) -> None:
    """By query or by JSON."""
    wish: dict[str, Any] = {"url": house.put("m", "3.0"), "version": "2.0", "order": "load_first"}

    answer = await client.post("/models/m/swap", **({"json": wish} if as_json else {"params": wish}))

    assert answer.status_code == 200
    document_of(SwapStatus, answer.json())
    told = {name: answer.json()[name] for name in ("modelName", "modelVersion", "replacedVersion", "order", "workers")}
    assert told == {
        "modelName": "m",
        "modelVersion": "3.0",
        "replacedVersion": "2.0",
        "order": "load_first",
        "workers": 1,
    }
    assert [each["modelVersion"] for each in (await client.get("/models/m/all")).json()] == ["1.0", "3.0"]


async def test_a_swap_can_be_tried_without_doing_it(house: House, client: httpx.AsyncClient) -> None:
    """The archive was looked at."""
    answer = await client.post(f"/models/m/swap?url={house.put('m', '3.0')}&dry_run=true")

    told = answer.json()
    document_of(SwapStatus, told)
    assert told["isDryRun"] is True
    assert told["status"] == 'Model "m" Version: 3.0 would take the place of version 1.0'
    assert (told["before"]["versions"], told["after"]["versions"]) == (["1.0", "2.0"], ["3.0", "2.0"])
    assert (told["replacedVersion"], told["order"], told["workers"]) == ("1.0", "load_first", 1)
    assert len((await client.get("/models/m/all")).json()) == 2


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 400, "Parameter url is required."),
        ("url=nothing.mar", 404, "Model not found"),
        ("url=m-3.0.mar&order=both", 400, "order is 'both'; it must be load_first or unload_first."),
        ("url=m-3.0.mar&model_name=n", 400, "model_name is 'n'; a swap stays within its model, m."),
        ("url=m-3.0.mar&verison=1.0", 400, "parameter 'verison' is not known and not used; did you mean version?"),
        ("url=m-3.0.mar&keep_old=ja", 400, "keep_old is 'ja', which counts as false; say true or false."),
        ("url=m-3.0.mar&version=9", 404, "Model version: 9 does not exist"),
        ("url=m-2.0.mar&version=1.0", 409, "already registered"),
    ],
)
async def test_a_swap_that_cannot_be_meant_is_refused(
    house: House, client: httpx.AsyncClient, query: str, status: int, words: str
) -> None:
    """A swap's parameters are nobody's old habit: what is not understood is not passed over."""
    house.put("m", "3.0")

    answer = await client.post(f"/models/m/swap?{query}")

    assert (answer.status_code, words in answer.json()["message"]) == (status, True), answer.text
    assert len((await client.get("/models/m/all")).json()) == 2


async def test_a_swap_that_fails_says_why_and_what_goes_on(house: House, client: httpx.AsyncClient) -> None:
    """Cause and reason travel beside the sentence."""
    house.pools.behaviours["m"] = Behaviour(load="fail")

    answer = await client.post(f"/models/m/swap?url={house.put('m', '3.0')}")

    assert answer.status_code == 500
    assert answer.json()["message"].startswith("Version 3.0 of model m was not taken, version 1.0 goes on answering:")
    assert answer.headers["x-marserve-cause"] == "load_failed"
    assert "the handler raised" in answer.headers["x-marserve-reason"]


async def test_without_the_model_api_there_is_no_swap(house: House) -> None:
    """As there is no register; weights and labels may always be changed, as the default may."""
    async with client_of(house.application(enable_model_api=False)) as client:
        assert (await client.post(f"/models/m/swap?url={house.put('m', '3.0')}")).status_code == 405
        assert (await client.put("/models/m/traffic", json={"weights": {"1.0": 1}})).status_code == 200
