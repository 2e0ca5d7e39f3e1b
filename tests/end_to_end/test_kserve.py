"""KServe's container for PyTorch: the storage initialiser's layout, the runtime's flags, the wrapper that asks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from marserve.api.grpc.schema import INFERENCE, OPEN_INFERENCE, OPEN_INFERENCE_OF_TORCHSERVE, Schema
from support.platforms import Started, run_to_end, started, write_properties
from support.server import free_ports, make_archive, poll

SCHEMA = Schema()

DOUBLE = """
import json

def double(value):
    return [double(each) for each in value] if isinstance(value, list) else 2 * value

def handle(data, context):
    rows = [row.get("body", row.get("data")) if isinstance(row, dict) else row for row in data or []]
    return [double(json.loads(bytes(row)) if isinstance(row, (bytes, bytearray)) else row) for row in rows]
"""

# As its examples have it: without startupTimeout and runtimeType.
KSERVE_SNAPSHOT = {
    "name": "startup.cfg",
    "modelCount": 1,
    "models": {
        "double": {
            "1.0": {
                "defaultVersion": True,
                "marName": "double.mar",
                "minWorkers": 1,
                "maxWorkers": 2,
                "batchSize": 1,
                "maxBatchDelay": 500,
                "responseTimeout": 60,
            }
        }
    },
}


FLAGS = ["--model-store={mnt}/model-store", "--ts-config={mnt}/config/config.properties", "--disable-token-auth"]
TENSOR = {"name": "x", "shape": [3], "datatype": "INT64", "data": [1, 2, 3]}
DOUBLED = [{"name": "x", "shape": [3], "datatype": "INT64", "data": [2, 4, 6]}]


class Runtime(Started):
    """A server as the runtime `kserve-torchserve` starts it, and where its other listeners are."""

    grpc: str
    metrics: str

    def wait_until_ready(self) -> None:
        """As the wrapper: look until a worker of the model is READY."""
        for _ in poll(60, "a worker is READY"):
            assert self.process.poll() is None, self.console()
            with contextlib.suppress(httpx.TransportError):
                described = self.get("/models/double?customized=false")
                if described.status_code == 200 and "READY" in [w["status"] for w in described.json()[0]["workers"]]:
                    return

    def ask(self, path: str, document: object) -> httpx.Response:
        """A POST of this JSON."""
        return httpx.post(f"{self.base}{path}", json=document, timeout=30)


@contextlib.contextmanager
def runtime(mnt: Path, **environment: str) -> Iterator[Runtime]:
    """What the storage initialiser put below `/mnt/models`, and the container's command and variables.

    One address is for inference and management, and the file alone lets variables of TorchServe's count.
    """
    port, metrics_port, grpc_port, grpc_management_port = free_ports(4)
    (mnt / "model-store").mkdir()
    make_archive(mnt / "model-store" / "double.mar", DOUBLE, config="minWorkers: 1\nmaxWorkers: 1\n")
    write_properties(
        mnt / "config" / "config.properties",
        {
            "inference_address": f"http://0.0.0.0:{port}",
            "management_address": f"http://0.0.0.0:{port}",
            "metrics_address": f"http://127.0.0.1:{metrics_port}",
            "grpc_inference_port": grpc_port,
            "grpc_management_port": grpc_management_port,
            "enable_metrics_api": "true",
            "metrics_format": "prometheus",
            "metrics_mode": "prometheus",
            "install_py_dep_per_model": "true",
            "number_of_netty_threads": "4",
            "job_queue_size": "10",
            "enable_envvars_config": "true",
            "model_store": mnt / "model-store",
            "load_models": "all",
            "model_snapshot": json.dumps(KSERVE_SNAPSHOT),
        },
    )
    words = [word.format(mnt=mnt) for word in FLAGS]
    with started(mnt, f"http://127.0.0.1:{port}", words, environment) as server:
        found = Runtime(server.process, server.base, server.folder)
        found.grpc, found.metrics = f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{metrics_port}/metrics"
        yield found


@pytest.mark.parametrize(
    ("envelope", "asked", "expected"),
    [("", 4, 8), ("kserve", {"instances": [1, 2]}, {"predictions": [2, 4]})],
    ids=["none", "kserve"],
)
def test_v1_is_answered_to_the_wrapper_and_directly(
    tmp_path: Path, envelope: str, asked: object, expected: object
) -> None:
    """The mounted bucket, the flags with `=`, one shared port, the envelope from the environment (perhaps empty)."""
    with runtime(tmp_path, TS_SERVICE_ENVELOPE=envelope, PROTOCOL_VERSION="v1") as server:
        server.wait_until_ready()
        answers = [server.ask(path, asked).json() for path in ("/predictions/double", "/v1/models/double:predict")]
        explained = server.ask("/v1/models/double:explain", asked)
        ready = server.get("/v1/models/double")
        restored = server.get("/models/double").json()[0]
        page = httpx.get(server.metrics)

    assert answers == [expected, expected]
    assert explained.status_code == 200
    assert ready.json() == {"name": "double", "ready": True}
    assert (restored["maxWorkers"], restored["maxBatchDelay"], restored["responseTimeout"]) == (2, 500, 60)
    assert "ts_inference_requests_total" in page.text


@pytest.mark.parametrize("package", [OPEN_INFERENCE, OPEN_INFERENCE_OF_TORCHSERVE])
def test_v2_is_answered_over_rest_and_grpc(tmp_path: Path, package: str) -> None:
    """Behind the wrapper, and by the server itself with `TS_OPEN_INFERENCE_PROTOCOL=oip`, under both names of it."""
    tensors = {"id": "7", "inputs": [TENSOR]}
    told = {"TS_SERVICE_ENVELOPE": "kservev2", "PROTOCOL_VERSION": "v2", "TS_OPEN_INFERENCE_PROTOCOL": "oip"}
    with runtime(tmp_path, **told) as server:
        server.wait_until_ready()
        answers = [server.ask(path, tensors) for path in ("/predictions/double", "/v2/models/double/infer")]
        probes = [server.get(path) for path in ("/v2/health/live", "/v2/health/ready")]
        with grpc.insecure_channel(server.grpc) as channel:
            forwarded = call(
                channel,
                f"{INFERENCE}.InferenceAPIsService/Predictions",
                ("PredictionsRequest", "PredictionResponse"),
                model_name="double",
                input={"data": json.dumps(tensors).encode()},
            )
            service = f"{package}.GRPCInferenceService"
            ready = call(channel, f"{service}/ModelReady", ("ModelReadyRequest", "ModelReadyResponse"), name="double")
            inferred = call(
                channel,
                f"{service}/ModelInfer",
                ("ModelInferRequest", "ModelInferResponse"),
                model_name="double",
                id="8",
                inputs=[{"name": "x", "shape": [3], "datatype": "INT64", "contents": {"int64_contents": [1, 2, 3]}}],
            )

    document = {"id": "7", "model_name": "double", "model_version": "1.0", "outputs": DOUBLED}
    assert [answer.json() for answer in answers] == [document, document]
    assert json.loads(forwarded.prediction) == document
    assert [probe.json() for probe in probes] == [{"live": True}, {"ready": True}]
    assert ready.ready
    assert (inferred.id, inferred.model_name) == ("8", "double")
    assert [list(output.contents.int64_contents) for output in inferred.outputs] == [[2, 4, 6]]


def call(channel: grpc.Channel, path: str, messages: tuple[str, str], **fields: Any) -> Any:
    """One call of a method, with a request of these fields."""
    asked, answered = (SCHEMA.message(f"{path.rpartition('.')[0]}.{message}") for message in messages)
    made = channel.unary_unary(
        f"/{path}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=answered.FromString,
    )
    return made(asked(**fields), timeout=30)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("model-store", "--model-store directory not found: {mnt}/model-store"),
        ("config/config.properties", "--ts-config file not found: {mnt}/config/config.properties"),
    ],
)
def test_a_volume_without_the_layout_ends_the_container(tmp_path: Path, missing: str, said: str) -> None:
    """In TorchServe's words; its status is 1."""
    (tmp_path / "model-store").mkdir()
    write_properties(tmp_path / "config" / "config.properties", {"model_store": tmp_path / "model-store"})
    path = tmp_path / missing
    path.rmdir() if path.is_dir() else path.unlink()

    status, console = run_to_end(tmp_path, [word.format(mnt=tmp_path) for word in FLAGS], {})

    assert (status, console.strip()) == (1, said.format(mnt=tmp_path))
    assert list((tmp_path / "tmp").iterdir()) == []
