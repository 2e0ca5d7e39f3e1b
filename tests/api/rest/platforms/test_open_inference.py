"""Tests for the Open Inference Protocol's REST routes beside inference."""

from __future__ import annotations

import httpx
import pytest

from marserve.api.rest.application import build_app
from marserve.api.rest.platforms.open_inference import open_inference_router
from support.management_house import client_of

pytestmark = pytest.mark.anyio


async def ask(method: str, path: str) -> httpx.Response:
    """What a listener with these routes answers."""
    async with client_of(build_app([open_inference_router()], title="t")) as client:
        return await client.request(method, path)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize(
    ("path", "document"), [("/v2/health/live", {"live": True}), ("/v2/health/ready/", {"ready": True})]
)
async def test_health_is_told_to_any_method(method: str, path: str, document: dict[str, bool]) -> None:
    """As recorded."""
    answer = await ask(method, path)

    assert (answer.status_code, answer.json()) == (200, document)


async def test_the_server_names_itself() -> None:
    """With the protocol's own spelling of `extensions`."""
    answer = await ask("GET", "/v2")

    assert set(answer.json()) == {"name", "version", "extensions"}


@pytest.mark.parametrize("path", ["/v2/models/m/versions/1.0", "/v2/models/m/versions/1.0/infer"])
async def test_versions_in_the_path_are_refused(path: str) -> None:
    """501, in TorchServe's words."""
    answer = await ask("POST", path)

    assert (answer.status_code, answer.json()) == (501, {"error": "Model versioning is not yet supported."})


async def test_a_models_metadata_is_not_there() -> None:
    """404: the handler alone knows its tensors."""
    assert (await ask("GET", "/v2/models/m")).status_code == 404
