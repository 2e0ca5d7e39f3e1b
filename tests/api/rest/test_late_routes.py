"""Tests for routes that are analysed when they are needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from marserve.api.rest import late_routes
from marserve.api.rest.application import PrettyJson, build_app
from marserve.api.rest.late_routes import LateRoute, described, described_body, new_router
from marserve.api.rest.models.management import management_router
from support.management_house import House, client_of


def is_analysed(route: Any) -> bool:
    """Whether FastAPI's part of a route is there."""
    return "dependant" in vars(route)


class Unwritten:
    """A body's model whose schema must not be written yet."""

    written = 0

    @classmethod
    def model_json_schema(cls, *, ref_template: str) -> dict[str, Any]:
        """Counts."""
        cls.written += 1
        return {"title": "Unwritten"}


def test_a_bodys_schema_is_written_with_its_routes_description() -> None:
    """What a start does not need is not made there."""
    extra = {"x-more": 1, "requestBody": {"required": True, "model": Unwritten}}
    route = LateRoute("/x", lambda: None, methods=["PUT"], openapi_extra=extra)
    before = Unwritten.written

    written = route.openapi_extra

    content = {"application/json": {"schema": {"title": "Unwritten"}}}
    assert (before, Unwritten.written) == (0, 1)
    assert written == {"x-more": 1, "requestBody": {"required": True, "content": content}}
    assert described_body({"parameters": []}) == {"parameters": []}
    assert LateRoute("/x", lambda: None).openapi_extra is None


@pytest.mark.anyio
async def test_a_request_analyses_its_own_route_alone(tmp_path: Path) -> None:
    """And that once."""
    router = management_router(House(tmp_path).registry, enable_model_api=True)
    app = build_app([router], title="test")
    assert not any(map(is_analysed, router.routes))

    async with client_of(app) as client:
        statuses = {(await client.get("/models")).status_code, (await client.get("/models")).status_code}
        refused = await client.patch("/models/none")

    assert statuses == {200}
    assert refused.status_code == 405
    [analysed] = filter(is_analysed, router.routes)
    assert isinstance(analysed, LateRoute)
    assert analysed.path == "/models"
    assert analysed.app is analysed.app


class OwnRoute(APIRoute):
    """FastAPI's, analysed at once; it knows no documents of ours."""

    def __init__(self, *given: Any, responses: dict[int | str, Any] | None = None, **options: Any) -> None:
        extra = described_body(options.pop("openapi_extra", None))
        super().__init__(*given, responses=described(responses or {}, {}), openapi_extra=extra, **options)


def test_they_are_described_as_fastapis_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, answers and names."""
    registry = House(tmp_path).registry

    late = management_router(registry, enable_model_api=True).routes
    monkeypatch.setattr(late_routes, "LateRoute", OwnRoute)
    own = management_router(registry, enable_model_api=True).routes

    assert {type(route) for route in late} == {LateRoute}
    assert {type(route) for route in own} == {OwnRoute}
    assert get_openapi(title="t", version="1", routes=late) == get_openapi(title="t", version="1", routes=own)


@pytest.mark.parametrize(
    ("methods", "known"), [(None, {"GET"}), (["put", "POST"], {"PUT", "POST"})], ids=["none", "two"]
)
def test_methods_are_known_before_and_the_same_after(methods: list[str] | None, known: set[str]) -> None:
    """GET if none is given."""
    route = LateRoute("/x", lambda: None, methods=methods)
    assert route.methods == known
    assert not is_analysed(route)

    assert route.dependant.path == "/x"
    assert route.methods == known


def test_what_is_on_no_route_is_no_reason_to_analyse_it_again() -> None:
    """It is an AttributeError."""
    router = new_router(PrettyJson)
    router.add_api_route("/x", lambda: None)
    [route] = router.routes
    analysed = vars(route).get

    with pytest.raises(AttributeError, match="LateRoute has no attribute 'colour'"):
        _ = route.colour  # type: ignore[attr-defined]
    first = analysed("dependant")

    assert not hasattr(route, "colour")
    assert first is analysed("dependant")


def test_threads_that_need_a_route_at_once_all_get_it() -> None:
    """The thread that writes the description, and the event loop."""
    routes = [LateRoute(f"/{number}", lambda: None) for number in range(50)]

    with ThreadPoolExecutor(4) as threads:
        seen = list(threads.map(lambda number: routes[number % 50].body_field, range(400)))

    assert seen == [None] * 400
