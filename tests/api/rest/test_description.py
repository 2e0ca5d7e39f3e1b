"""Tests for the API description: it is valid, and it says what the listeners do."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from marserve.api.http.inference import read_route
from marserve.api.rest import description
from marserve.api.rest.application import build_app
from marserve.api.rest.description import description_router
from marserve.api.rest.platforms.metrics import metrics_router
from marserve.registry.intake.registration import RegisterParameters
from marserve.telemetry.metrics.server_metrics import Metrics
from support.management_house import House, client_of
from support.metric_pages import scrapes_of

pytestmark = pytest.mark.anyio


async def ask(app: Any, method: str = "OPTIONS", path: str = "/") -> dict[str, Any]:
    """The description that a listener gives."""
    async with client_of(app) as client:
        response = await client.request(method, path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    document: dict[str, Any] = response.json()
    return document


def check_references(document: dict[str, Any]) -> None:
    """Every `$ref` leads somewhere, every operation has a name of its own, every path names its parameters."""
    names: list[str] = []
    for path, item in document["paths"].items():
        for operation in item.values():
            names.append(operation["operationId"])
            named = {each["name"] for each in operation.get("parameters", []) if each["in"] == "path"}
            assert named == {part.partition("}")[0] for part in path.split("{")[1:]}
    assert len(names) == len(set(names))

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                place: Any = document
                for step in value["$ref"].removeprefix("#/").split("/"):
                    place = place[step]
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(document)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("management", [True, False])
async def test_each_listener_describes_what_it_serves(tmp_path: Path, inference: bool, management: bool) -> None:
    """In OpenAPI 3, and in itself consistent."""
    house = House(tmp_path)

    document = await ask(house.application(management=management, inference=inference))

    assert document["openapi"].startswith("3.")
    check_references(document)
    assert ("/predictions/{model_name}" in document["paths"]) is inference
    assert ("/ping" in document["paths"]) is inference
    assert ("/models/{model_name}/{model_version}/set-default" in document["paths"]) is management


async def test_the_description_is_at_both_places_for_any_method(tmp_path: Path) -> None:
    """`OPTIONS /` and `/api-description`."""
    app = House(tmp_path).application()
    document = await ask(app)

    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        assert await ask(app, method, "/api-description") == document


async def test_the_metrics_listener_is_described(tmp_path: Path) -> None:
    """With its one filter."""
    routers = [description_router(House(tmp_path).registry), metrics_router(scrapes_of(Metrics("host")))]

    document = await ask(build_app(routers, title="metrics"))

    check_references(document)
    [filter_] = document["paths"]["/metrics"]["get"]["parameters"]
    assert filter_["name"] == "name[]"


async def test_parameters_have_their_true_types(tmp_path: Path) -> None:
    """Though words are accepted where the contract wants it."""
    document = await ask(House(tmp_path).application())

    parameters = {each["name"]: each for each in document["paths"]["/models"]["post"]["parameters"]}
    assert parameters["batch_size"]["schema"]["type"] == "integer"
    assert parameters["synchronous"]["schema"]["type"] == "boolean"
    body = document["paths"]["/models"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(parameters)


async def test_every_described_inference_path_is_a_route(tmp_path: Path) -> None:
    """The connection serves it."""
    document = await ask(House(tmp_path).application(management=False, inference=True))

    paths = [path for path, item in document["paths"].items() if "post" in item]
    assert len(paths) == 13
    for path in paths:
        assert read_route(path.replace("{", "").replace("}", "").encode()) is not None


async def test_where_open_inference_is_spoken_in_full_its_versions_and_bodies_are_described(tmp_path: Path) -> None:
    """As the connection reads them: a version in the path, tensors and instances as JSON."""
    routers = [description_router(House(tmp_path).registry, has_inference=True, has_open_inference=True)]

    document = await ask(build_app(routers, title="all"))

    check_references(document)
    path = "/v2/models/{model_name}/versions/{model_version}/infer"
    route = read_route(path.replace("{", "").replace("}", "").encode(), marks_open_inference=True)
    assert route is not None
    assert (route.model, route.version) == ("model_name", "model_version")
    tensors = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert tensors["required"] == ["inputs"]
    instances = document["paths"]["/v1/models/{model_name}:predict"]["post"]["requestBody"]["content"]
    assert instances["application/json"]["schema"]["required"] == ["instances"]


@pytest.mark.parametrize(
    "path",
    [
        *("/predictions/m", "/predictions/m/1.0", "/explanations/m", "/explanations/m/1.0", "/v1/models/m:predict"),
        *("/v1/models/m:explain", "/v2/models/m/infer", "/v2/models/m/explain", "/models/m/invoke", "/m/predict"),
        *("/m/1.0/predict", "/predictions/m/"),
    ],
)
@pytest.mark.parametrize("management", [True, False])
async def test_options_on_an_inference_route_describes_its_model(tmp_path: Path, path: str, management: bool) -> None:
    """On a shared listener too."""
    house = House(tmp_path)
    await house.registry.register(RegisterParameters(house.put()))
    app = house.application(management=management, inference=True)

    document = await ask(app, path=path)

    assert document["info"]["title"] == "RESTful API for: m"
    assert "/predictions/m" in document["paths"]
    check_references(document)
    async with client_of(app) as client:
        unknown = await client.options(
            path.replace("m", "nobody", 1) if path == "/m/predict" else "/predictions/nobody"
        )
    assert unknown.json()["message"] == "Model not found: nobody"
    await house.registry.stop()


async def test_options_on_a_model_s_management_path_describes_what_can_be_done(tmp_path: Path) -> None:
    """For a model that is there."""
    house = House(tmp_path)
    await house.registry.register(RegisterParameters(house.put()))
    app = house.application(inference=True)

    for path in ("/models/m", "/models/m/1.0"):
        document = await ask(app, path=path)
        check_references(document)
        assert document["info"]["title"] == "RESTful Management API for: m"
        assert set(document["paths"]) == {
            "/models/{model_name}",
            "/models/{model_name}/{model_version}",
            "/models/{model_name}/{model_version}/set-default",
            "/models/{model_name}/check",
            "/models/{model_name}/{model_version}/check",
            "/models/{model_name}/traffic",
            "/models/{model_name}/labels",
            "/models/{model_name}/labels/{label}",
            "/models/{model_name}/swap",
        }
    async with client_of(app) as client:
        for path in ("/models/nobody", "/models/m/7"):
            assert (await client.options(path)).status_code == 404
    await house.registry.stop()


@pytest.mark.parametrize("name", ["a/b", "a{b}c", "ü %"])
async def test_a_model_s_odd_name_stays_a_name_in_its_description(tmp_path: Path, name: str) -> None:
    """Escaped as it must be sent."""
    house = House(tmp_path)
    await house.registry.register(RegisterParameters(house.put(), model_name=name))
    escaped = "".join(f"%{byte:02X}" for byte in name.encode())

    document = await ask(house.application(management=False, inference=True), path=f"/predictions/{escaped}")

    check_references(document)
    [path] = [path for path in document["paths"] if path.startswith("/predictions") and "{model_version}" not in path]
    route = read_route(path.encode())
    assert route is not None
    assert route.model == name
    await house.registry.stop()


class Writing:
    """Stands in for FastAPI's writer: counts its runs and the threads they ran in, waits for `may_end`, may fail."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.may_end = threading.Event()
        self.fails = False

    def __call__(self, **_: Any) -> dict[str, Any]:
        """Write a document of nothing."""
        self.threads.append(threading.get_ident())
        assert self.may_end.wait(30)
        if self.fails:
            raise RuntimeError("no schema of this")
        return {"openapi": "3.1.0", "info": {"title": "t", "version": "1"}, "paths": {}}


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Writing:
    """What writes documents in place of FastAPI."""
    writing = Writing()
    monkeypatch.setattr(description, "get_openapi", writing)
    return writing


async def test_concurrent_first_requests_have_one_document_written_off_the_loop(
    tmp_path: Path, writing: Writing
) -> None:
    """By one run in one thread, while the loop goes on; a client that leaves does not take it from the others."""
    app = House(tmp_path).new_application()
    async with client_of(app) as client:
        asked = [asyncio.create_task(client.options("/")) for _ in range(5)]
        leaving = asked.pop(0)
        while not writing.threads:
            await asyncio.sleep(0.001)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert not any(one.done() for one in asked)
        writing.may_end.set()
        answers = [await one for one in asked]
        again = await client.get("/api-description")

    assert {answer.status_code for answer in answers} == {200}
    assert {answer.content for answer in [*answers, again]} == {again.content}
    assert len(writing.threads) == 1
    assert writing.threads[0] != threading.get_ident()


async def test_a_document_that_cannot_be_written_is_an_error_and_is_tried_again(
    tmp_path: Path, writing: Writing, caplog: pytest.LogCaptureFixture
) -> None:
    """500 for all that waited, one traceback in the log, and the next request gets the document."""
    app = House(tmp_path).new_application()
    writing.fails = True
    writing.may_end.set()

    async with client_of(app) as client:
        failed = await asyncio.gather(*(client.options("/") for _ in range(3)))
        writing.fails = False
        good = await client.options("/")

    assert {answer.status_code for answer in failed} == {500}
    assert "server's log says why" in failed[0].json()["message"]
    assert [record.message for record in caplog.records if record.exc_info] == [
        "The API description could not be written"
    ]
    assert good.status_code == 200


async def test_an_answer_with_a_written_document_costs_no_writing(tmp_path: Path, monkeypatch: Any) -> None:
    """Of the listener, a model or a workflow: once written, nothing is rendered as JSON any more."""
    house = House(tmp_path)
    await house.registry.register(RegisterParameters(house.put()))
    app = house.application(inference=True)
    paths = ("/", "/models/m", "/models/m/1.0", "/predictions/m", "/v2/models/m/infer", "/wfpredict/w")
    before = [await ask(app, path=path) for path in paths]
    monkeypatch.setattr(description, "PrettyJson", None)

    after = [await ask(app, path=path) for path in paths]

    assert after == before
    assert after[-1]["info"]["title"] == "RESTful API for: w"
    assert list(after[-1]["paths"]) == ["/wfpredict/w"]
    await house.registry.stop()
