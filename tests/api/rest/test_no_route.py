"""Tests for what a client is told whose request has no route."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

from marserve.api.errors import AS_RECORDED, ErrorRules
from marserve.api.rest.application import build_app
from marserve.api.rest.description import description_router
from marserve.api.rest.models.management import management_router
from marserve.api.rest.platforms.health import health_router
from marserve.registry.models import Registry
from support.management_house import client_of

pytestmark = pytest.mark.anyio

ALL = "OPTIONS / has all routes."


@pytest.fixture(scope="module")
def routers() -> list[Any]:
    """The routes of a listener of both APIs."""
    registry = cast(Registry, None)  # no route is called
    return [
        description_router(registry, has_inference=True, has_management=True),
        health_router(registry, has_ping=True),
        management_router(registry, enable_model_api=True),
    ]


async def ask(
    routers: list[Any], method: str, path: str, only_model: str | None = None, rules: ErrorRules | None = None
) -> httpx.Response:
    """The answer, under `marserve` unless there are other rules."""
    rules = ErrorRules(as_recorded=False) if rules is None else rules
    app = build_app(routers, title="test", error_rules=rules, only_model=lambda: only_model)
    async with client_of(app) as client:
        return await client.request(method, path)


@pytest.mark.parametrize(
    ("path", "only_model", "near"),
    [
        ("/predict", None, "/predictions/{model_name}"),
        ("/predict", "shout", "/predictions/shout"),
        ("/prediction/digits", "shout", "/predictions/digits"),
        ("/prediction/digits/2.0", None, "/predictions/digits/2.0"),
        ("/model", None, "/models"),
        ("/modles/digits", None, "/models/digits"),
        ("/pnig", None, "/ping"),
    ],
)
async def test_a_path_without_a_route_is_answered_with_the_nearest(
    routers: list[Any], path: str, only_model: str | None, near: str
) -> None:
    """With the names that the path has, and the one model that there is."""
    answer = await ask(routers, "POST", path, only_model)

    assert answer.status_code == 404
    assert answer.json()["message"] == f"There is no route {path} here; did you mean {near}? {ALL}"


@pytest.mark.parametrize("path", ["/x", "/wp-admin", "/" + "predict" * 100])
async def test_a_path_like_no_route_is_answered_with_where_all_are(routers: list[Any], path: str) -> None:
    """A long one is cut, and compared with nothing."""
    answer = await ask(routers, "POST", path)

    assert answer.status_code == 404
    assert answer.json()["message"].startswith("There is no route /")
    assert len(answer.content) < 300
    assert "did you mean" not in answer.text


async def test_a_method_that_a_path_does_not_take_is_answered_with_those_that_it_takes(routers: list[Any]) -> None:
    """Of all its routes."""
    answer = await ask(routers, "PATCH", "/models/digits")

    assert answer.status_code == 405
    assert answer.json()["message"] == f"/models/digits takes DELETE, GET, HEAD, OPTIONS, PUT, not PATCH. {ALL}"
    assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PUT"


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/predict", "Requested resource is not found, please refer to API document."),
        ("PATCH", "/models", "Requested method is not allowed, please refer to API document."),
    ],
)
async def test_under_torchserve_both_sentences_are_as_recorded(
    routers: list[Any], method: str, path: str, said: str
) -> None:
    """Clients compare them."""
    answer = await ask(routers, method, path, "shout", AS_RECORDED)

    assert answer.json()["message"] == said
