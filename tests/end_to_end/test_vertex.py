"""Vertex AI: a container that is told by variables where it is called and where the model's files are."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from support.object_stores import S3Server
from support.platforms import ImageHome, started, write_properties
from support.server import free_ports, make_archive, poll

DOUBLE = """
import contextlib
import json
def handle(data, context):
    rows = [row.get("body", row.get("data")) if isinstance(row, dict) else row for row in data or []]
    return [2 * (json.loads(bytes(row)) if isinstance(row, (bytes, bytearray)) else row) for row in rows]
"""
# Without an envelope a handler sees all of a request, and answers all of what Vertex AI takes.
SCALE = """
def handle(data, context):
    asked = [row["body"] for row in data or []]
    return [{"predictions": [each["parameters"]["factor"] * one["x"] for one in each["instances"]]} for each in asked]
"""
ROUTES = {
    "AIP_HEALTH_ROUTE": "/v1/endpoints/17/deployedModels/4",
    "AIP_PREDICT_ROUTE": "/v1/endpoints/17/deployedModels/4:predict",
}


@pytest.fixture
def image(tmp_path: Path) -> ImageHome:
    """An image's file system."""
    (tmp_path / "home").mkdir()
    return ImageHome(tmp_path / "home")


def predict(base: str) -> httpx.Response:
    """What Vertex AI sends on for a client."""
    return httpx.post(f"{base}{ROUTES['AIP_PREDICT_ROUTE']}", json={"instances": [1, 2, 3]}, timeout=30)


@pytest.mark.parametrize("where", ["bucket", "folder"])
def test_a_container_fetches_its_model_and_answers_at_the_port_and_paths_that_vertex_names(
    image: ImageHome, tmp_path: Path, where: str, request: pytest.FixtureRequest
) -> None:
    """The platform's variables, the envelope, nothing else; Google's store is a stand-in, or a folder of a local
    endpoint.
    """
    archive = make_archive(tmp_path / "model.mar", DOUBLE, config="minWorkers: 1\nmaxWorkers: 1\n")
    (port,) = free_ports(1)
    told = {"AIP_HTTP_PORT": str(port), **ROUTES, "MARSERVE_SERVICE_ENVELOPE": "json", "AIP_MODE": "PREDICTION"}
    if where == "bucket":
        pytest.importorskip("obstore")
        pytest.importorskip("moto")
        s3: S3Server = request.getfixturevalue("s3")
        bucket = s3.bucket()
        bucket.put("4/model.mar", archive.read_bytes())
        told["AIP_STORAGE_URI"] = f"gs://{bucket.name}/4"
        told["MARSERVE_STORES"] = json.dumps({"gs://": {"endpoint_url": bucket.url, "anonymous": True}})
    else:
        told["AIP_STORAGE_URI"] = str(tmp_path)
    with image.serve(port, **told) as server:
        server.wait_until(ROUTES["AIP_HEALTH_ROUTE"])
        answer = predict(server.base)
        usual = httpx.post(f"{server.base}/predictions/model", json={"instances": [4]}, timeout=30)

    assert (answer.json(), usual.json()) == ({"predictions": [2, 4, 6]}, {"predictions": [8]})


def test_a_container_is_healthy_when_its_model_answers_and_not_before(image: ImageHome, tmp_path: Path) -> None:
    """Vertex AI sends requests to whoever says yes; `/ping` is TorchServe's, which says it too early.

    Requests are of Vertex AI's shape, with `parameters`.
    """
    go = tmp_path / "go"
    waiting = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n{SCALE}"
    make_archive(tmp_path / "model.mar", waiting, config="minWorkers: 1\nmaxWorkers: 1\n")
    told = {**ROUTES, "AIP_HTTP_PORT": str(image.port), "AIP_STORAGE_URI": str(tmp_path)}
    with image.serve(**told) as server:
        server.wait_until("/livez")
        early = server.get(ROUTES["AIP_HEALTH_ROUTE"])
        go.touch()
        server.wait_until(ROUTES["AIP_HEALTH_ROUTE"])
        asked = {"instances": [{"x": 1}, {"x": 2}], "parameters": {"factor": 3}}
        answer = httpx.post(f"{server.base}{ROUTES['AIP_PREDICT_ROUTE']}", json=asked, timeout=30)

    assert (early.status_code, early.json()) == (503, {"status": "Unhealthy"})
    assert answer.json() == {"predictions": [3, 6]}


def test_a_container_without_its_model_is_never_healthy(image: ImageHome, tmp_path: Path) -> None:
    """And its log says what was not found where."""
    told = {**ROUTES, "AIP_HTTP_PORT": str(image.port), "AIP_STORAGE_URI": str(tmp_path)}
    with image.serve(**told) as server:
        server.wait_until("/startupz")
        for _ in poll(30, "the log says it"):
            if f"Model not found at: {tmp_path}/model.mar" in server.console():
                break
        check = server.get(ROUTES["AIP_HEALTH_ROUTE"])

    assert check.status_code == 503


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AIP_HTTP_PORT", "abc", "AIP_HTTP_PORT is 'abc', and inference_address is made of it; it must be a whole"),
        ("AIP_STORAGE_URI", "s3://bucket/4", "AIP_STORAGE_URI is 's3://bucket/4', and load_models is made of it"),
        ("AIP_PREDICT_ROUTE", "predict", "predict_route is 'predict'; it must be a path such as"),
    ],
)
def test_what_vertexs_variables_cannot_mean_ends_the_container(
    image: ImageHome, variable: str, value: str, said: str
) -> None:
    """With one sentence in its log, and nothing left. Its command is TorchServe's, and so is the status."""
    status, console = image.fail(**{**ROUTES, "AIP_HTTP_PORT": "8080", variable: value})

    assert status == 1
    assert console.count("\n") == 1
    assert said in console
    assert f"({variable})" in console
    assert list((image.folder / "tmp").iterdir()) == []


def test_an_address_that_is_configured_goes_before_vertexs_port(tmp_path: Path) -> None:
    """Custom containers name their own, and tell the platform."""
    (tmp_path / "store").mkdir()
    port, management_port, metrics_port, other, grpc_port, grpc_management_port = free_ports(6)
    settings = write_properties(
        tmp_path / "vertex.properties",
        {
            "inference_address": f"http://127.0.0.1:{port}",
            "management_address": f"http://127.0.0.1:{management_port}",
            "metrics_address": f"http://127.0.0.1:{metrics_port}",
            "grpc_inference_port": grpc_port,
            "grpc_management_port": grpc_management_port,
        },
    )
    words = ["--model-store", "store", "--ts-config", str(settings), "--disable-token-auth"]
    with started(tmp_path, f"http://127.0.0.1:{port}", words, {"AIP_HTTP_PORT": str(other)}) as server:
        server.wait_until("/ping")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{other}/ping")
