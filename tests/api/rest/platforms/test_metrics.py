"""Tests for the metrics listener."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open

from marserve.api.rest.application import build_app
from marserve.api.rest.platforms.metrics import metrics_router
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.scrapes import MAX_SCRAPES
from marserve.telemetry.metrics.server_metrics import Metrics
from support.management_house import client_of
from support.metric_pages import scrapes_of

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
    async with client_of(build_app([metrics_router(scrapes_of(metrics))], title="metrics")) as client:
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


async def test_without_prometheus_the_page_is_there_and_empty() -> None:
    """Contract 3.1: `metrics_mode=log`, whatever format is asked for."""
    async with client_of(build_app([metrics_router(scrapes_of(Metrics("h", mode="log")))], title="metrics")) as client:
        response = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})

    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


async def test_prometheus_gets_openmetrics_by_its_own_header(client: httpx.AsyncClient) -> None:
    """What Prometheus 3 sends."""
    response = await client.get("/metrics", headers={"accept": PROMETHEUS})

    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert int(response.headers["content-length"]) == len(response.content)
    families = {family.name: family for family in parse_open(response.text)}
    assert families["marserve_requests"].type == "counter"
    assert families["ts_inference_latency_microseconds"].type == "unknown"


ABSURD = ["", "*/*", ",;=,,;q=", "text/html", "é" * 30, "a," * 30_000]


@pytest.mark.parametrize("accept", [*ABSURD, "application/openmetrics-text;version=" + "1" * 5000], ids=str.__len__)
async def test_an_absurd_accept_header_gets_the_text_format(client: httpx.AsyncClient, accept: str) -> None:
    """No error: who scrapes by hand sends anything."""
    response = await client.get("/metrics", headers={"accept": accept.encode()})

    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# TYPE marserve_requests_total counter" in response.text


async def test_a_version_that_is_no_number_is_no_error(client: httpx.AsyncClient) -> None:
    """The library raises for it, or takes it for none."""
    response = await client.get("/metrics", headers={"accept": "application/openmetrics-text;version=abc"})

    assert response.status_code == 200
    assert "abc" not in response.headers["content-type"]


async def test_a_version_of_openmetrics_that_does_not_exist_is_not_promised(client: httpx.AsyncClient) -> None:
    """The library would repeat it."""
    response = await client.get("/metrics", headers={"accept": "application/openmetrics-text;version=77.1"})

    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"


async def test_one_scrape_too_many_is_refused_in_words(metrics: Metrics) -> None:
    """Clients that do not read hold pages, so there is a bound; a place that is given back is free again."""
    scrapes = scrapes_of(metrics)
    async with client_of(build_app([metrics_router(scrapes)], title="metrics")) as client:
        async with contextlib.AsyncExitStack() as hanging:
            for _ in range(MAX_SCRAPES):
                await hanging.enter_async_context(scrapes.taking())
            refused = await client.get("/metrics")
        taken = await client.get("/metrics")

    assert refused.status_code == 503
    assert "32 clients are taking the metrics page" in refused.json()["message"]
    assert taken.status_code == 200
    assert scrapes.open == 0


@pytest.mark.parametrize("path", ["/metricz", "/", "/models"])
async def test_there_is_nothing_else(client: httpx.AsyncClient, path: str) -> None:
    """404 in the contract's words."""
    assert (await client.get(path)).json()["type"] == "ResourceNotFoundException"
