"""Tests for the routes of the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from marserve import __version__
from marserve.api.http.inference import read_route
from marserve.api.rest.application import build_app
from marserve.api.rest.description import describe_once, description_router
from marserve.api.rest.pages.files import DASHBOARD_FILES, FILES, HEADERS
from marserve.api.rest.pages.router import links_of, offers_router, pages_router
from marserve.registry.intake.registration import RegisterParameters
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio

HTML = {"accept": "text/html,*/*;q=0.8"}


def listener(house: House) -> Any:
    """The application of an inference listener, as far as pages go."""
    written = describe_once(has_inference=True)
    return build_app(
        [
            pages_router(links_of(has_inference=True), written),
            description_router(house.registry, has_inference=True, written=written),
            offers_router(house.registry),
        ],
        title="test",
    )


def management_listener(*, has_dashboard: bool = True) -> Any:
    """The application of a management listener, as far as pages go."""
    links = links_of(has_management=True, has_dashboard=has_dashboard)
    return build_app([pages_router(links, describe_once(has_management=True))], title="test")


async def test_the_root_says_what_answers_and_where_to_go_on(tmp_path: Path) -> None:
    """As JSON, unless HTML is asked for."""
    async with client_of(listener(House(tmp_path))) as client:
        answer = await client.get("/")

    assert answer.status_code == 200
    assert answer.headers["vary"] == "Accept"
    assert answer.json() == {
        "name": "marserve",
        "version": __version__,
        "status": "alive",
        "links": {
            "docs": "/docs",
            "openapi": "/openapi.json",
            "ready": "/readyz",
            "predictions": "/predictions/{model_name}",
        },
    }


def test_each_listener_links_what_it_serves() -> None:
    """Management and metrics too."""
    assert set(links_of(has_management=True)) == {"docs", "openapi", "ready", "models"}
    assert set(links_of(has_metrics=True)) == {"docs", "openapi", "metrics"}
    assert links_of(has_management=True, has_dashboard=True)["dashboard"] == "/dashboard"


async def test_a_browser_gets_the_page_at_the_root_and_at_docs(tmp_path: Path) -> None:
    """With the policy that lets nothing else run."""
    async with client_of(listener(House(tmp_path))) as client:
        root = await client.get("/", headers=HTML)
        docs = await client.get("/docs")

    assert root.content == docs.content
    assert root.headers["vary"] == "Accept"
    for answer in (root, docs):
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert {name: answer.headers[name] for name in HEADERS} == dict(HEADERS)


async def test_a_browser_gets_the_dashboard_at_the_root_of_management() -> None:
    """And at `/dashboard`; the page of routes stays at `/docs`, JSON at the root for all else."""
    async with client_of(management_listener()) as client:
        root = await client.get("/", headers=HTML)
        dashboard = await client.get("/dashboard")
        docs = await client.get("/docs")
        card = (await client.get("/")).json()

    assert root.content == dashboard.content != docs.content
    assert root.headers["vary"] == "Accept"
    assert {name: dashboard.headers[name] for name in HEADERS} == dict(HEADERS)
    assert card["links"]["dashboard"] == "/dashboard"


async def test_listeners_without_management_have_no_dashboard(tmp_path: Path) -> None:
    """Nor has the management of `torchserve`, whose routes would not fill it: no page and none of its files."""
    for app in (listener(House(tmp_path)), management_listener(has_dashboard=False)):
        async with client_of(app) as client:
            root = await client.get("/", headers=HTML)

            assert root.content == (await client.get("/docs")).content
            for path in DASHBOARD_FILES:
                assert (await client.get(path)).status_code == 404


async def test_every_file_is_sent_once_and_then_confirmed() -> None:
    """304 for the browser that has it, and only headers for `HEAD`."""
    async with client_of(management_listener()) as client:
        for path, (_, media_type) in {**FILES, **DASHBOARD_FILES}.items():
            answer = await client.get(path)
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            head = await client.head(path)

            assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == head.headers["etag"] == answer.headers["etag"]
            assert head.status_code == 200


@pytest.mark.parametrize("path", ["/docs/dashboard/dashboard.html", "/docs/docs.html", "/docs/vendored/VENDORED.json"])
async def test_files_that_the_page_does_not_need_are_not_served(tmp_path: Path, path: str) -> None:
    """Nor is any path looked up among files."""
    async with client_of(listener(House(tmp_path))) as client:
        assert (await client.get(path)).status_code == 404
        assert (await client.get("/docs/..%2fdocs.html")).status_code == 404


@pytest.mark.parametrize("path", ["/docs", "/dashboard"])
async def test_a_slash_at_the_end_leads_to_the_page(path: str) -> None:
    """What the page loads would be looked for a folder too deep."""
    async with client_of(management_listener()) as client:
        answer = await client.get(f"{path}/")

    assert (answer.status_code, answer.headers["location"]) == (308, f"..{path}")


async def test_openapi_json_is_the_api_description(tmp_path: Path) -> None:
    """The pages are in it."""
    async with client_of(listener(House(tmp_path))) as client:
        document = (await client.get("/openapi.json")).json()
        described = (await client.options("/")).json()

    assert document == described
    assert {"/", "/openapi.json", "/docs/models", "/docs/models/{model_name}/versions"} <= set(document["paths"])


async def test_other_methods_are_refused_as_before(tmp_path: Path) -> None:
    """405, and `OPTIONS /` is the description."""
    async with client_of(listener(House(tmp_path))) as client:
        assert (await client.post("/")).status_code == 405
        assert (await client.delete("/docs")).status_code == 405
        assert (await client.head("/")).status_code == 200


async def test_models_are_offered_with_what_they_take(tmp_path: Path) -> None:
    """Each version, oldest first."""
    house = House(tmp_path)
    await house.registry.register(RegisterParameters(house.put("m", "1.0", handler="image_classifier")))
    await house.registry.register(RegisterParameters(house.put("m", "2.0")))
    async with client_of(listener(house)) as client:
        names = (await client.get("/docs/models")).json()
        versions = (await client.get("/docs/models/m/versions")).json()
        unknown = await client.get("/docs/models/nobody/versions")

    assert names == {"models": [{"name": "m", "version": "1.0", "state": "idle"}], "workflows": []}
    assert versions == {
        "name": "m",
        "versions": [
            {"version": "1.0", "isDefault": True, "state": "idle", "expects": "image"},
            {"version": "2.0", "isDefault": False, "state": "idle", "expects": "anything"},
        ],
    }
    assert unknown.status_code == 404
    await house.registry.stop()


async def test_models_come_in_pages(tmp_path: Path) -> None:
    """As in the management API."""
    house = House(tmp_path)
    for name in ("a", "b", "c"):
        await house.registry.register(RegisterParameters(house.put(name)))
    async with client_of(listener(house)) as client:
        first = (await client.get("/docs/models", params={"limit": 2})).json()
        second = (await client.get("/docs/models", params={"next_page_token": first["nextPageToken"]})).json()

    assert [each["name"] for each in first["models"]] == ["a", "b"]
    assert [each["name"] for each in second["models"]] == ["c"]
    assert "nextPageToken" not in second
    await house.registry.stop()


@pytest.mark.parametrize(
    "path", ["/", *FILES, *DASHBOARD_FILES, "/docs/models", "/docs/models/predict/versions", "/openapi.json"]
)
def test_no_page_is_an_inference_route(path: str) -> None:
    """Whatever a model is called, the connection hands these on."""
    assert read_route(path.encode()) is None
