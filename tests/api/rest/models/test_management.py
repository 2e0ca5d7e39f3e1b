"""Tests for the management API over HTTP, in the contract's words, over pools without processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from marserve.answers.management import CheckReport, ErrorBody, KServeReady, ModelDescription, ModelList, StatusMessage
from marserve.api.rest.application import build_app
from marserve.api.rest.models.management import management_router
from marserve.messages import Answer
from marserve.model_options import IN_FORCE, OPTIONS
from marserve.names import name_fault
from marserve.settings import ModelToLoad
from support.documents import document_of
from support.echo_archives import manifest, write_mar
from support.fake_pool import Behaviour, a_death
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A registry with a store; stopped in the end, with nothing left."""
    house = House(tmp_path, unregister_timeout_s=0.2)
    yield house
    await house.registry.stop()
    assert house.folders() == []


@pytest.fixture
async def client(house: House) -> AsyncIterator[httpx.AsyncClient]:
    """Who speaks to the management listener."""
    async with client_of(house.application()) as client:
        yield client


def error(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error, whose object has nothing else and repeats the status."""
    body = document_of(ErrorBody, response.content)
    assert response.headers["content-type"] == "application/json"
    assert body.code == response.status_code
    return response.status_code, body.type, body.message


def status(response: httpx.Response) -> tuple[int, str]:
    """Status and sentence of a success."""
    return response.status_code, document_of(StatusMessage, response.content).status


async def describe(client: httpx.AsyncClient, path: str) -> list[dict[str, Any]]:
    """The description of versions, which has the published shape."""
    response = await client.get(path)
    assert response.status_code == 200
    document_of(list[ModelDescription], response.content)
    described: list[dict[str, Any]] = response.json()
    return described


ROUTE_NOT_FOUND = (
    404,
    "ResourceNotFoundException",
    "Requested resource is not found, please refer to API document.",
)
METHOD_NOT_ALLOWED = (
    405,
    "MethodNotAllowedException",
    "Requested method is not allowed, please refer to API document.",
)


async def test_the_published_description_has_each_option_that_describe_shows() -> None:
    """Else clients made from it would not find what the server says."""
    shown = {option.key for option in OPTIONS if option.is_described} | set(IN_FORCE)

    assert shown <= set(ModelDescription.__struct_fields__)


async def test_bodies_are_laid_out_as_torchserve_lays_them_out(client: httpx.AsyncClient) -> None:
    """Two blanks, one line end, for successes and errors alike."""
    assert (await client.get("/models")).content == b'{\n  "models": []\n}\n'
    assert (await client.get("/models/x")).content == (
        b'{\n  "code": 404,\n  "type": "ModelNotFoundException",\n  "message": "Model not found: x"\n}\n'
    )


async def test_a_registration_says_what_it_registered_except_as_torchserve(house: House) -> None:
    """The archive's manifest may have named it."""
    archive = house.put()
    routes = management_router(house.registry, enable_model_api=True, as_recorded=False)
    async with client_of(build_app([routes], title="t")) as client:
        own = (await client.post(f"/models?url={archive}&model_name=own")).json()
    async with client_of(build_app([management_router(house.registry, enable_model_api=True)], title="t")) as client:
        recorded = (await client.post(f"/models?url={archive}&model_name=recorded")).json()

    assert (own["modelName"], own["modelVersion"]) == ("own", "1.0")
    assert list(recorded) == ["status"]


async def test_a_model_is_registered_from_the_query(house: House, client: httpx.AsyncClient) -> None:
    """All parameters arrive."""
    archive = house.put()
    query = "model_name=full&handler=echo.py&runtime=python&batch_size=5&max_batch_delay=77&response_timeout=44"

    response = await client.post(f"/models?url={archive}&{query}&startup_timeout=55&initial_workers=1&synchronous=true")

    assert status(response) == (200, 'Model "full" Version: 1.0 registered with 1 initial workers')
    [described] = await describe(client, "/models/full")
    names = ["batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout", "minWorkers", "maxWorkers", "modelUrl"]
    assert [described[name] for name in names] == [5, 77, 44, 55, 1, 1, archive]


async def test_a_model_is_registered_from_a_json_body_and_the_query_then_does_not_count(
    house: House, client: httpx.AsyncClient
) -> None:
    """Whatever case the content type is written in, and whatever follows it."""
    body = {"url": house.put(), "model_name": "by_json", "batch_size": 3}

    response = await client.post(
        "/models?model_name=by_query&batch_size=9",
        content=json.dumps(body),
        headers={"content-type": "Application/JSON; charset=utf-8"},
    )

    assert response.status_code == 200
    assert (await describe(client, "/models/by_json"))[0]["batchSize"] == 3


async def test_a_form_body_is_not_read(house: House, client: httpx.AsyncClient) -> None:
    """Contract 2.1."""
    response = await client.post("/models", data={"url": house.put()})

    assert error(response) == (400, "BadRequestException", "Parameter url is required.")


async def test_a_registration_that_does_not_wait_is_accepted(house: House, client: httpx.AsyncClient) -> None:
    """202, and its workers are on their way."""
    house.pools.behaviours["m"] = Behaviour(load="wait")

    response = await client.post(f"/models?url={house.put()}&initial_workers=1&synchronous=false")

    assert status(response) == (202, "Processing worker updates...")
    [described] = await describe(client, "/models/m")
    assert (described["workers"][0]["status"], described["state"]) == ("LOADING", "loading")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", (400, "BadRequestException", "Parameter url is required.")),
        ("url=", (404, "ModelNotFoundException", "empty url")),
        ("url=gone.mar", (404, "ModelNotFoundException", "Model not found at: gone.mar")),
        (
            "url=../store/m.mar",
            (404, "ModelNotFoundException", "Relative path is not allowed in url: ../store/m.mar"),
        ),
        ("url=m-1.0.mar&runtime=ruby", (400, "BadRequestException", "Invalid RuntimeType value: ruby")),
        ("url=m-1.0.mar&batch_size=0", (400, "BadRequestException", "batch_size must be 1 or more.")),
        (
            "url=http://elsewhere/x.mar",
            (
                404,
                "ModelNotFoundException",
                "Given URL http://elsewhere/x.mar does not match any allowed URL(s)",
            ),
        ),
        (
            "url=m-1.0.mar&handler=no_such_module&initial_workers=1",
            (500, "InternalServerException", "Failed to start workers for model m version: 1.0"),
        ),
    ],
)
async def test_a_registration_that_cannot_be_done_says_why(
    house: House, client: httpx.AsyncClient, query: str, expected: tuple[int, str, str]
) -> None:
    """Status, type and message are the contract's, and nothing is left."""
    house.put()

    assert error(await client.post(f"/models?{query}")) == expected
    assert house.folders() == []


@pytest.mark.parametrize(("load", "code"), [("fail", 500), ("memory", 507)])
async def test_workers_that_cannot_load_end_the_registration(
    house: House, client: httpx.AsyncClient, load: str, code: int
) -> None:
    """507 when memory ran out."""
    house.pools.behaviours["m"] = Behaviour(load=load)

    response = await client.post(f"/models?url={house.put()}&initial_workers=1")

    assert error(response) == (
        code,
        "InternalServerException",
        "Failed to start workers for model m version: 1.0",
    )
    assert error(await client.get("/models/m"))[0] == 404


async def test_a_second_registration_of_a_version_conflicts(house: House, client: httpx.AsyncClient) -> None:
    """409 in the contract's words."""
    archive = house.put()
    await client.post(f"/models?url={archive}")

    assert error(await client.post(f"/models?url={archive}")) == (
        409,
        "ConflictStatusException",
        "Model version 1.0 is already registered for model m",
    )


async def test_odd_parameters_are_accepted_and_told(house: House, client: httpx.AsyncClient) -> None:
    """As recorded, but not without a word."""
    response = await client.post(
        f"/models?url={house.put()}&batch_size=x&initial_workers=-2&max_batch_delay=1.5&colour=blue"
    )

    assert response.status_code == 200
    [described] = await describe(client, "/models/m")
    assert (described["batchSize"], described["minWorkers"], described["maxBatchDelay"]) == (1, 0, 100)
    assert len(described["warnings"]) == 4


@pytest.mark.parametrize("body", ["", "{", "[]", '{"url": "m-1.0.mar", "batch_size": "many"}', '{"url": "\\ud800"}'])
async def test_json_that_cannot_be_used_is_the_client_s_fault(
    house: House, client: httpx.AsyncClient, body: str
) -> None:
    """400, not TorchServe's 500."""
    house.put()

    response = await client.post("/models", content=body, headers={"content-type": "application/json"})

    assert error(response)[:2] == (400, "BadRequestException")


async def test_versions_are_described_one_by_one_and_all_together(house: House, client: httpx.AsyncClient) -> None:
    """Without a version the default one."""
    await client.post(f"/models?url={house.put()}")
    await client.post(f"/models?url={house.put('m', '2.0')}")

    assert [each["modelVersion"] for each in await describe(client, "/models/m")] == ["1.0"]
    assert [each["modelVersion"] for each in await describe(client, "/models/m/2.0")] == ["2.0"]
    assert [each["modelVersion"] for each in await describe(client, "/models/m/all?customized=true")] == ["1.0", "2.0"]
    assert error(await client.get("/models/m/7.7")) == (
        404,
        "ModelVersionNotFoundException",
        "Model version: 7.7 does not exist for model: m",
    )


async def test_a_failed_worker_is_described_with_its_reason(house: House, client: httpx.AsyncClient) -> None:
    """In the published shape."""
    await client.post(f"/models?url={house.put()}&initial_workers=1")
    house.pools.of("m").last_death = a_death()

    [described] = await describe(client, "/models/m")

    assert described["lastDeath"]["cause"] == "killed"


async def test_a_customized_description_is_the_handler_s_too(house: House, client: httpx.AsyncClient) -> None:
    """Its headers are on the answer, but what frames an answer is ours."""
    house.pools.behaviours["m"] = Behaviour(metadata=b'{"a": 1}', headers=[("x-mine", "1"), ("Content-Length", "3")])
    await client.post(f"/models?url={house.put()}&initial_workers=1")

    response = await client.get("/models/m?customized=TRUE")

    assert response.json()[0]["customizedMetadata"] == {"a": 1}
    assert response.headers["x-mine"] == "1"
    assert int(response.headers["content-length"]) == len(response.content)


async def test_a_customized_description_asks_with_the_clients_headers(house: House, client: httpx.AsyncClient) -> None:
    """The handler may answer by them."""
    house.pools.behaviours["m"] = Behaviour(metadata=None)
    await client.post(f"/models?url={house.put()}&initial_workers=1")
    asking = asyncio.create_task(client.get("/models/m?customized=true", headers={"x-mine": "1"}))
    pool = house.pools.of("m")
    while not pool.held:
        await asyncio.sleep(0)
    held = pool.held[0]
    held.answer(Answer(b'{"a": 1}'))

    assert (await asking).json()[0]["customizedMetadata"] == {"a": 1}
    assert (b"x-mine", b"1") in held.request.headers


async def test_a_header_of_the_handler_that_is_no_http_fails_the_description(
    house: House, client: httpx.AsyncClient
) -> None:
    """It must not become a second header."""
    house.pools.behaviours["m"] = Behaviour(metadata=b"{}", headers=[("x-mine", "1\r\nx-other: 2")])
    await client.post(f"/models?url={house.put()}&initial_workers=1")

    assert error(await client.get("/models/m?customized=true"))[:2] == (500, "InternalServerException")


async def test_a_customized_description_needs_a_worker(house: House, client: httpx.AsyncClient) -> None:
    """503 in words of its own."""
    await client.post(f"/models?url={house.put()}")

    assert error(await client.get("/models/m?customized=true")) == (
        503,
        "ServiceUnavailableException",
        'Model "m" has no worker to serve describe request. Please use scale workers API to add workers.',
    )


async def test_the_list_comes_in_pages(house: House, client: httpx.AsyncClient) -> None:
    """A token is there only if something follows; words for numbers count as not given."""
    for name in "abc":
        await client.post(f"/models?url={house.put(name)}")

    first = await client.get("/models?limit=2")
    last = await client.get("/models?limit=2&next_page_token=2")
    words = await client.get("/models?limit=two&next_page_token=x")

    for page in (first, last, words):
        document_of(ModelList, page.content)
    assert first.json()["nextPageToken"] == "2"
    assert last.json() == {"models": [{"modelName": "c", "modelUrl": "c-1.0.mar"}]}
    assert len(words.json()["models"]) == 3


async def test_a_model_is_scaled(house: House, client: httpx.AsyncClient) -> None:
    """One worker is the default, nobody waits by default, the version may stand in path or query."""
    await client.post(f"/models?url={house.put()}")

    assert status(await client.put("/models/m")) == (202, "Processing worker updates...")
    assert status(await client.put("/models/m?min_worker=2&synchronous=true")) == (
        200,
        "Workers scaled to 2 for model: m",
    )
    assert status(await client.put("/models/m/1.0?min_worker=1&max_worker=2&synchronous=true")) == (
        200,
        "Workers scaled to 1 for model: m, version: 1.0",
    )
    assert status(await client.put("/models/m?model_version=1.0&max_worker=3&synchronous=true"))[1].endswith(
        "version: 1.0"
    )
    assert house.pools.of("m").scaled == [(1, 1), (2, 2), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("m?min_worker=3&max_worker=1", (400, "BadRequestException", "max_worker cannot be less than min_worker.")),
        ("nobody?min_worker=1", (404, "ModelNotFoundException", "Model not found: nobody")),
        (
            "m/9.9?min_worker=1",
            (404, "ModelVersionNotFoundException", "Model version: 9.9 does not exist for model: m"),
        ),
    ],
)
async def test_a_scaling_that_cannot_be_done_says_why(
    house: House, client: httpx.AsyncClient, path: str, expected: tuple[int, str, str]
) -> None:
    """Status, type and message are the contract's."""
    await client.post(f"/models?url={house.put()}")

    assert error(await client.put(f"/models/{path}")) == expected


async def test_a_negative_number_of_workers_is_the_client_s_fault(house: House, client: httpx.AsyncClient) -> None:
    """400, not TorchServe's 500."""
    await client.post(f"/models?url={house.put()}")

    assert error(await client.put("/models/m?min_worker=-1&synchronous=true"))[:2] == (400, "BadRequestException")


@pytest.mark.parametrize("name", ["min_worker", "max_worker", "batch_size", "max_batch_delay"])
async def test_a_number_that_is_none_changes_nothing_and_is_told(
    house: House, client: httpx.AsyncClient, name: str
) -> None:
    """400 with the parameter and the value: scaled to one worker is not what was asked for."""
    await client.post(f"/models?url={house.put()}")

    status_code, kind, message = error(await client.put(f"/models/m?{name}=abc&synchronous=true"))

    assert (status_code, kind) == (400, "BadRequestException")
    assert message == f"{name} is 'abc'; it must be a whole number of at most 2147483647."
    assert house.pools.of("m").scaled == []


async def test_odd_words_of_a_scaling_are_logged_once_and_listed_by_describe(
    house: House, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """It is done all the same."""
    await client.post(f"/models?url={house.put()}")

    for _ in range(3):
        assert (await client.put("/models/m?min_workers=2&min_worker=2&synchronous=yes")).status_code == 202

    told = [
        "parameter 'min_workers' is not known and not used; did you mean min_worker?",
        "synchronous is 'yes', which counts as false; say true or false",
    ]
    assert (await describe(client, "/models/m"))[0]["warnings"] == told
    assert [record.getMessage() for record in caplog.records if "Model m" in record.getMessage()] == [
        f"Model m version 1.0: {sentence}" for sentence in told
    ]


async def test_odd_words_of_a_list_are_logged_once(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """TorchServe takes them for not given."""
    async with client_of(house.new_application()) as client:
        for _ in range(3):
            assert (await client.get("/models?limit=two")).status_code == 200

    logged = [record.getMessage() for record in caplog.records if "limit" in record.getMessage()]
    assert logged == ["GET /models: limit is 'two', which is no whole number; it counts as not given"]


async def test_the_default_version_is_set(house: House, client: httpx.AsyncClient) -> None:
    """And refused for what is not there, without the colon that other answers have."""
    await client.post(f"/models?url={house.put()}")
    await client.post(f"/models?url={house.put('m', '2.0')}")

    response = await client.put("/models/m/2.0/set-default")

    assert status(response) == (200, 'Default version successfully updated for model "m" to "2.0"')
    assert (await describe(client, "/models/m"))[0]["modelVersion"] == "2.0"
    assert error(await client.put("/models/m/5.5/set-default")) == (
        404,
        "ModelVersionNotFoundException",
        "Model version 5.5 does not exist for model m",
    )
    assert error(await client.put("/models/nobody/1.0/set-default"))[2] == "Model not found: nobody"


async def test_a_version_is_unregistered(house: House, client: httpx.AsyncClient) -> None:
    """The default one only as the last."""
    await client.post(f"/models?url={house.put()}")
    await client.post(f"/models?url={house.put('m', '2.0')}")
    refused = (403, "InvalidModelVersionException", "Cannot remove default version for model m")

    assert error(await client.delete("/models/m")) == refused
    assert error(await client.delete("/models/m/1.0")) == refused
    assert status(await client.delete("/models/m/2.0")) == (200, 'Model "m" unregistered')
    assert status(await client.delete("/models/m")) == (200, 'Model "m" unregistered')
    assert error(await client.delete("/models/m")) == (404, "ModelNotFoundException", "Model not found: m")


async def test_kserve_is_told_the_truth(house: House, client: httpx.AsyncClient) -> None:
    """Ready is a model whose workers have loaded it (contract, Q18)."""
    await client.post(f"/models?url={house.put()}")

    before = await client.get("/v1/models/m")
    await client.put("/models/m?synchronous=true")
    after = await client.get("/v1/models/m")

    assert document_of(KServeReady, before.content) == KServeReady(name="m", ready=False)
    assert after.json() == {"name": "m", "ready": True}
    assert error(await client.get("/v1/models/nobody"))[2] == "Model not found: nobody"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("DELETE", "/models"), ("PATCH", "/models"), ("PUT", "/models"), ("HEAD", "/models"), ("OPTIONS", "/models")),
        *(("POST", "/models/m"), ("PATCH", "/models/m"), ("POST", "/models/m/1.0"), ("BREW", "/models/m")),
        *(("POST", "/models/m/1.0/set-default"), ("GET", "/models/m/1.0/set-default")),
        *(("POST", "/v1/models/m"), ("GET", "/"), ("POST", "/"), ("DELETE", "/")),
    ],
)
async def test_the_wrong_method_on_a_route_is_405(client: httpx.AsyncClient, method: str, path: str) -> None:
    """In the contract's words."""
    response = await client.request(method, path)

    assert response.status_code == 405
    if method != "HEAD":
        assert error(response) == METHOD_NOT_ALLOWED


@pytest.mark.parametrize(
    "path",
    [
        *("/no/such/route", "/models/m/1.0/more", "/models/m/1.0/set-default/x", "/v1", "/v1/models", "/v1/models/a/b"),
        *(
            "/ping",
            "/predictions/m",
            "/models//m",
            "/Models",
            "/models%0A",
            "/docs",
            "/redoc",
            "/openapi.json",
            "/token",
        ),
    ],
)
async def test_what_is_no_route_is_404(client: httpx.AsyncClient, path: str) -> None:
    """Also what other listeners serve."""
    assert error(await client.get(path)) == ROUTE_NOT_FOUND


@pytest.mark.parametrize("path", ["/models/", "/models//"])
async def test_slashes_at_the_end_do_not_count(client: httpx.AsyncClient, path: str) -> None:
    """Contract 1.1."""
    assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["a/b", "a b", "ä", "a%b", "..", ".", "a?b", "a#b", "a;b", "%2F", "\n", "\x00", "'\"<>", "{model_name}", "\x85"],
)
async def test_a_name_of_any_characters_is_one_name(house: House, client: httpx.AsyncClient, name: str) -> None:
    """Paths are split before they are decoded (contract, Q48); some of the names only a start can bring."""
    archive = house.put()
    escaped = "".join(f"%{byte:02X}" for byte in name.encode())

    if name_fault("model", name) is None:
        assert (await client.post("/models", json={"url": archive, "model_name": name})).status_code == 200
    else:
        assert (await client.post("/models", json={"url": archive, "model_name": name})).status_code == 400
        await house.registry.load_at_start([ModelToLoad(archive, name)])
    unknown = await client.get(f"/models/{escaped}{escaped}")

    assert (await client.get(f"/models/{escaped}")).json()[0]["modelName"] == name
    assert error(unknown) == (404, "ModelNotFoundException", f"Model not found: {name}{name}")
    assert (await client.put(f"/models/{escaped}/1.0/set-default")).status_code == 200
    assert (await client.delete(f"/models/{escaped}/1.0")).status_code == 200


async def test_numbers_of_scaling_are_numbers_and_those_of_a_registration_may_be_words(
    house: House, client: httpx.AsyncClient
) -> None:
    """As is recorded of the latter; nobody who writes `many` means 1, which TorchServe then scales to."""
    registered = await client.post(f"/models?url={house.put()}&initial_workers=abc&batch_size=many")
    scaled = [await client.put(f"/models/m?{word}=many&initial_workers=abc") for word in ("min_worker", "max_worker")]

    assert status(registered)[0] == 200
    assert status(registered)[1].startswith('Model "m" Version: 1.0 registered with 0 initial workers.')
    for word, answer in zip(("min_worker", "max_worker"), scaled, strict=True):
        expected = f"{word} is 'many'; it must be a whole number of at most 2147483647."
        assert error(answer) == (400, "BadRequestException", expected)
    assert (await describe(client, "/models/m"))[0]["minWorkers"] == 0


async def test_a_configuration_that_the_archive_lacks_is_a_warning(house: House, client: httpx.AsyncClient) -> None:
    """The model is registered without one, and describe says what is missing."""
    archive = write_mar(house.store / "c.mar", manifest("c", configFile="gone.yaml")).name

    answer = await client.post(f"/models?url={archive}&initial_workers=1&synchronous=true")

    assert status(answer) == (200, 'Model "c" Version: 1.0 registered with 1 initial workers')
    warnings = (await describe(client, "/models/c"))[0]["warnings"]
    assert "the archive has no gone.yaml, which its manifest names as configFile" in warnings


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/models//1.0"), ("PUT", "/models//1.0/set-default"), ("DELETE", "/models//1.0")]
)
async def test_an_empty_segment_names_no_model(client: httpx.AsyncClient, method: str, path: str) -> None:
    """It is no route; an empty `model_name` is not given, so the archive's name counts."""
    assert error(await client.request(method, path))[:2] == (404, "ResourceNotFoundException")


@pytest.mark.parametrize(
    "path", ["/models/%FF%FE", "/models/%", "/models/%zz", "/%", "/models?limit=%FF", "/models?%00=%00", "/models?&&=&"]
)
async def test_bytes_that_are_no_text_never_fail_the_server(client: httpx.AsyncClient, path: str) -> None:
    """They are answered like any other name or value."""
    assert (await client.get(path)).status_code in (200, 404)


async def test_without_the_model_api_models_can_be_scaled_but_neither_come_nor_go(
    house: House, client: httpx.AsyncClient
) -> None:
    """405, and the description does not promise it."""
    await client.post(f"/models?url={house.put()}")

    async with client_of(house.application(enable_model_api=False)) as restricted:
        assert error(await restricted.post("/models?url=m-1.0.mar")) == METHOD_NOT_ALLOWED
        assert error(await restricted.delete("/models/m")) == METHOD_NOT_ALLOWED
        assert error(await restricted.delete("/models/m/1.0")) == METHOD_NOT_ALLOWED
        assert (await restricted.put("/models/m?synchronous=true")).status_code == 200
        assert (await restricted.get("/models/m/1.0")).status_code == 200
        assert "post" not in (await restricted.options("/")).json()["paths"]["/models"]


async def test_a_draining_server_takes_no_registrations(house: House, client: httpx.AsyncClient) -> None:
    """503, with the time after which trying again may pay."""
    house.registry.refuse_new()

    response = await client.post(f"/models?url={house.put()}")

    assert error(response)[:2] == (503, "ServiceUnavailableException")
    assert response.headers["retry-after"] in {"1", "2", "3"}
    assert response.headers["x-marserve-cause"] == "draining"


async def test_what_nobody_foresaw_is_a_500_without_a_word_of_it(
    house: House, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the traceback."""

    def fail(*_: object) -> None:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(house.registry, "list_models", fail)

    response = await client.get("/models")

    assert error(response)[:2] == (500, "InternalServerException")
    assert "secret" not in response.text
    assert "a secret path" in caplog.text


async def test_batch_size_and_delay_are_changed_without_a_restart(house: House, client: httpx.AsyncClient) -> None:
    """Alone, or together with the number of workers; describe shows them."""
    await client.post("/models", params={"url": house.put(), "initial_workers": 1})

    alone = await client.put("/models/m", params={"batch_size": 8, "max_batch_delay": 20})
    one = await client.put("/models/m/1.0", params={"max_batch_delay": 0})
    both = await client.put("/models/m", params={"batch_size": 4, "min_worker": 2, "synchronous": "true"})

    assert status(alone) == (200, 'Model "m" Version: 1.0 forms batches of up to 8, delay 20 ms')
    assert status(one) == (200, 'Model "m" Version: 1.0 forms batches of up to 8, delay 0 ms')
    assert status(both) == (200, "Workers scaled to 2 for model: m")
    assert house.pools.of("m").scaled == [(2, 2)]
    described = (await describe(client, "/models/m"))[0]
    assert (described["batchSize"], described["maxBatchDelay"]) == (4, 0)


@pytest.mark.parametrize("query", ["batch_size=0", "batch_size=65537", "max_batch_delay=-1", "max_batch_delay=3600001"])
async def test_a_batch_size_or_delay_out_of_bounds_changes_nothing(
    house: House, client: httpx.AsyncClient, query: str
) -> None:
    """The bounds are named."""
    await client.post("/models", params={"url": house.put()})

    answered = error(await client.put(f"/models/m?{query}"))

    assert answered[0] == 400
    assert "it must be from" in answered[2]
    assert (await describe(client, "/models/m"))[0]["batchSize"] == 1


async def test_a_batch_size_that_is_no_number_does_not_count_as_a_call_to_scale(
    house: House, client: httpx.AsyncClient
) -> None:
    """Which it would be without one."""
    await client.post("/models", params={"url": house.put()})

    answered = error(await client.put("/models/m?batch_size=1O"))

    assert (answered[0], answered[2]) == (400, "batch_size is '1O'; it must be a whole number of at most 2147483647.")
    assert house.pools.of("m").scaled == []


async def test_batches_are_checked_on_demand(house: House, client: httpx.AsyncClient) -> None:
    """With one sample, with several, or with the model's own; the report has the published shape."""
    await client.post("/models", params={"url": house.put()})
    pool = house.pools.of("m")
    pool.report = {
        "certificate": "failed",
        "passed": False,
        "samples": 2,
        "batchSizes": [1, 2],
        "answersCompared": 4,
        "differencesFound": 1,
        "differences": [{"run": "together (2)", "item": 0, "path": "a", "seen": "1", "wanted": "2"}],
        "notes": [],
        "seconds": 0.1,
    }

    own = await client.post("/models/m/check")
    single = await client.post("/models/m/1.0/check", content=b"one", headers={"content-type": "text/plain"})
    several = await client.post("/models/m/check", files=[("s", b"one"), ("s", b"two")])

    for response in (own, single, several):
        assert response.status_code == 200
        assert document_of(CheckReport, response.content).modelName == "m"
    assert pool.checked == [[], [b"one"], [b"one", b"two"]]


async def test_a_check_of_too_many_samples_or_of_nothing_known_is_refused(
    house: House, client: httpx.AsyncClient
) -> None:
    """Before any worker hears of it."""
    await client.post("/models", params={"url": house.put()})

    many = error(await client.post("/models/m/check", files=[("s", b"x")] * 65))

    assert many[0] == 400
    assert "at most 64" in many[2]
    assert (await client.post("/models/nobody/check")).status_code == 404
    assert (await client.post("/models/m/7/check")).status_code == 404
    assert house.pools.of("m").checked == []
