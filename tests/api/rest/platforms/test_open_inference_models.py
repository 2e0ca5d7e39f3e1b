"""Tests for the Open Inference Protocol's REST routes as `marserve` answers them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marserve.api.errors import ErrorRules
from marserve.api.rest.application import build_app
from marserve.api.rest.platforms.open_inference_models import open_inference_models_router
from marserve.registry.intake.registration import RegisterParameters
from support.management_house import House, client_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def house(tmp_path: Path) -> House:
    """Two versions of a model, of which the first has a worker."""
    house = House(tmp_path)
    for version, workers in (("1.0", 1), ("2.0", 0)):
        await house.registry.register(RegisterParameters(house.put("m", version), initial_workers=workers))
    return house


async def ask(house: House, method: str, path: str, **how: Any) -> tuple[int, Any]:
    """Status and document of an answer."""
    rules = ErrorRules(as_recorded=False)
    app = build_app([open_inference_models_router(house.registry)], title="t", error_rules=rules)
    async with client_of(app) as client:
        answer = await client.request(method, path, **how)
        return answer.status_code, answer.json()


# ------------------------------------------------------------------------------------------- what is not there


@pytest.mark.parametrize("end", ["", "/ready", "/config", "/stats"])
async def test_what_is_not_there_is_404_with_the_protocols_key(house: House, end: str) -> None:
    """A model, and a version of one that is there; the message says what there is."""
    status, document = await ask(house, "GET", f"/v2/models/other{end}")
    assert (status, document["error"]) == (404, document["message"])
    assert "other" in document["error"]

    status, document = await ask(house, "GET", f"/v2/models/m/versions/3.0{end}")
    assert status == 404
    assert "1.0, 2.0" in document["error"]


@pytest.mark.parametrize(
    "body", [b"[", b"[]", b'{"ready": 1}', b"\xff", b'{"ready":' + b"[" * 5000, b" " * 70_000 + b"{}"]
)
async def test_an_index_is_asked_for_by_an_object_or_nothing(house: House, body: bytes) -> None:
    """400, and what the body must be."""
    status, document = await ask(house, "POST", "/v2/repository/index", content=body)

    assert status == 400
    assert document["error"].startswith("The body of /v2/repository/index ")


# ------------------------------------------------------------------------------------------- what is


async def test_readiness_is_told_of_the_server_a_model_and_a_version(house: House) -> None:
    """503 with `ready: false` of a version without workers, and why."""
    assert await ask(house, "GET", "/v2/health/live") == (200, {"live": True})
    status, document = await ask(house, "GET", "/v2/health/ready")
    readiness = house.registry.readiness()
    assert (status, document["ready"]) == ((200, True) if readiness.is_ready else (503, False))
    assert document.get("reasons", []) == list(readiness.reasons)
    assert await ask(house, "GET", "/v2/models/m/ready") == (200, {"name": "m", "ready": True})
    assert await ask(house, "GET", "/v2/models/m/versions/2.0/ready") == (
        503,
        {
            "name": "m",
            "ready": False,
            "reason": "it is scaled to 0 workers",
            "workers": {"ready": 0, "needed": 1},
        },
    )


async def test_metadata_and_configuration_are_of_the_version_that_is_named(house: House) -> None:
    """All versions are listed."""
    status, document = await ask(house, "GET", "/v2/models/m/versions/2.0")
    assert (status, document["name"], document["versions"]) == (200, "m", ["1.0", "2.0"])

    status, document = await ask(house, "GET", "/v2/models/m/versions/2.0/config")
    assert (status, document["parameters"]["version"]) == (200, {"string_value": "2.0"})
    assert (await ask(house, "GET", "/v2/models/m/config"))[1]["parameters"]["version"] == {"string_value": "1.0"}


@pytest.mark.parametrize("end", ["", "/ready", "/config", "/stats"])
async def test_a_model_is_named_by_the_path_alone(house: House, end: str) -> None:
    """Encoded where it must be; a version in the query is not read."""
    await house.registry.register(RegisterParameters(house.put("n", "1.0"), model_name="\u00e4 n"))

    status, document = await ask(house, "GET", f"/v2/models/%C3%A4%20n{end}?model_version=7.0")

    assert status == (503 if end == "/ready" else 200)
    assert "\u00e4 n" in json.dumps(document, ensure_ascii=False)


async def test_the_index_has_all_versions_or_those_that_answer(house: House) -> None:
    """An empty body asks for all."""
    _, whole = await ask(house, "POST", "/v2/repository/index")
    _, ready = await ask(house, "POST", "/v2/repository/index", json={"ready": True})

    assert [(each["name"], each["version"], each["state"]) for each in whole] == [
        ("m", "1.0", "READY"),
        ("m", "2.0", "UNAVAILABLE"),
    ]
    assert [each["version"] for each in ready] == ["1.0"]


@pytest.mark.parametrize(
    ("path", "versions"),
    [
        ("/v2/models/stats", ["1.0", "2.0"]),
        ("/v2/models/m/stats", ["1.0", "2.0"]),
        ("/v2/models/m/versions/2.0/stats", ["2.0"]),
    ],
)
async def test_statistics_are_of_all_versions_or_of_one(house: House, path: str, versions: list[str]) -> None:
    """Each with its name."""
    status, document = await ask(house, "GET", path)

    assert (status, [each["version"] for each in document["model_stats"]]) == (200, versions)
