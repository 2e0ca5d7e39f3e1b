"""Tests for the metrics listener."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from marserve.api.rest.application import build_app
from marserve.api.rest.platforms.metrics import metrics_router
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.server_metrics import Metrics
from support.management_house import client_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def metrics() -> Metrics:
    """Metrics with one version that had two requests."""
    metrics = Metrics("host")
    version = VersionMetrics("m", "1.0")
    version.requests = 2
    metrics.register(version)
    return metrics


@pytest.fixture
async def client(metrics: Metrics) -> AsyncIterator[httpx.AsyncClient]:
    """Who speaks to the metrics listener."""
    async with client_of(build_app([metrics_router(metrics)], title="metrics")) as client:
        yield client


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "BREW"])
@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "/metrics/any/thing"])
async def test_the_page_answers_any_method_and_whatever_follows(
    client: httpx.AsyncClient, metrics: Metrics, method: str, path: str
) -> None:
    """Contract 3.1."""
    response = await client.request(method, path)

    assert (response.status_code, response.content) == (200, metrics.render())
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_the_page_can_be_narrowed_to_names(client: httpx.AsyncClient) -> None:
    """Written with brackets or escaped, once or several times."""
    name = "ts_inference_requests_total"

    for query in (f"name[]={name}", f"name%5B%5D={name}&name%5B%5D=other", f"name[]=other&name[]={name}"):
        text = (await client.get(f"/metrics?{query}")).text
        assert [line.split(" ")[0] for line in text.splitlines()[:2]] == ["#", "#"]
        assert all(name in line for line in text.splitlines())
    assert (await client.get("/metrics?name[]=nosuch")).text == ""


async def test_without_prometheus_the_page_is_there_and_empty(metrics: Metrics) -> None:
    """Contract 3.1: `metrics_mode=log`."""
    async with client_of(build_app([metrics_router(metrics, is_filled=False)], title="metrics")) as client:
        response = await client.get("/metrics")

    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("path", ["/metricz", "/", "/models"])
async def test_there_is_nothing_else(client: httpx.AsyncClient, path: str) -> None:
    """404 in the contract's words."""
    assert (await client.get(path)).json()["type"] == "ResourceNotFoundException"
