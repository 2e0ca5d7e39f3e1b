"""Pods as the manifests say them, run here: the command, the variables, the settings, the probes and the end."""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from marserve.api.grpc.schema import Schema
from support.container import Container, Running
from support.manifests import Document, documents
from support.object_stores import Bucket, S3Server
from support.pages import ROOT
from support.server import make_archive
from support.wheels import write_wheel

DOUBLE = """
import json
def twice(value):
    return [twice(each) for each in value] if isinstance(value, list) else 2 * value
def handle(data, context):
    rows = [row.get("body", row.get("data")) if isinstance(row, dict) else row for row in data or []]
    return [twice(json.loads(bytes(row)) if isinstance(row, (bytes, bytearray)) else row) for row in rows]
"""

ECHO = """
def handle(data, context):
    return [bytes(row.get("body") or row.get("data")) for row in data or []]
"""

# Loads when somebody opens the other end, so that a test can look at a server that is loading.
GATED = """
import pathlib
class Handler:
    def initialize(self, context):
        pathlib.Path(context.system_properties["model_dir"], "gate").read_bytes()
    def handle(self, data, context):
        return [bytes(row.get("body") or row.get("data")) for row in data]
"""


# As TorchServe's documentation of its chart has it, with one model.
CHART_CONFIG = """
inference_address=http://0.0.0.0:8080
management_address=http://0.0.0.0:8081
metrics_address=http://0.0.0.0:8082
NUM_WORKERS=1
number_of_gpu=1
number_of_netty_threads=32
job_queue_size=1000
metrics_mode=prometheus
model_store=/home/model-server/shared/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"echo":{"1.0":{"defaultVersion":true,"marName":"echo.mar","minWorkers":1,"maxWorkers":1,"batchSize":1,"maxBatchDelay":10,"responseTimeout":60}}}}
"""


def file_of(name: str) -> list[Document]:
    """The documents of a file below docker/."""
    return documents((ROOT / "docker" / name).read_text())


def variables_of(container: Document) -> dict[str, str]:
    """A container's own variables."""
    return {each["name"]: each["value"] for each in container.get("env", [])}


def put_config(container: Container) -> None:
    """What the ConfigMap of the base puts into the pod."""
    text = (ROOT / "docker/kubernetes/base/config.properties").read_text()
    container.write("/home/model-server/config/config.properties", text)


def unpack(archive: Path, folder: Path) -> None:
    """An archive as a plain folder."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)


def listeners(running: Running) -> dict[int, str]:
    """The ports of the container that it listens on, each with the host's address it is bound to."""
    real = {port: inside for inside, port in running.container.ports.items()}
    found = {}
    for process in psutil.Process(running.process.pid).children(recursive=True):
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port in real:
                host = each.laddr.ip.removeprefix("::ffff:")
                found[real[each.laddr.port]] = "0.0.0.0" if host == "::" else host
    return found


def paths_below(folder: Path) -> set[str]:
    """Everything in a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.system
def test_a_pod_of_the_base_lives_as_its_probes_and_its_end_expect(tmp_path: Path) -> None:
    """Loading: alive, not started, not ready. Loaded: all. Told to end: answers on, not ready, ends well in time.

    Its model is a folder of a volume that is only read, and it is served where it lies.
    """
    [deployment] = file_of("kubernetes/base/deployment.yaml")
    spec = deployment["spec"]["template"]["spec"]
    [pod] = spec["containers"]
    probes = {name: pod[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    claim = tmp_path / "claim"
    claim.mkdir()
    archive = make_archive(tmp_path / "gated.mar", GATED, config="minWorkers: 1\nmaxWorkers: 1\n")
    unpack(archive, claim / "gated")
    (claim / "gated" / "weights.bin").write_bytes(b"w" * 1000)
    gate = claim / "gated" / "gate"
    os.mkfifo(gate)
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["volumeMounts"]}
    container = Container(tmp_path / "pod", {mounts["models"]: claim})
    put_config(container)
    before = paths_below(claim)

    def answers() -> dict[str, int]:
        return {name: running.get(8080, path).status_code for name, path in probes.items()}

    with container.running(pod["args"], variables_of(pod)) as running:
        running.wait_until(8080, probes["liveness"])
        while_loading = answers()
        gate.write_bytes(b"")  # opens once a worker reads
        running.wait_until(8080, probes["readiness"])
        loaded = answers()
        bound = listeners(running)
        predicted = httpx.post(container.url(8080, "/predictions/gated"), content=b"one", timeout=30)
        page = running.get(8082, "/metrics").text
        unpacked = paths_below(container.path("/home/model-server/tmp"))
        server = psutil.Process(running.process.pid)
        server.terminate()
        told = time.monotonic()
        running.wait_until(8080, probes["readiness"], 503)
        ending = answers()
        late = httpx.post(container.url(8080, "/predictions/gated"), content=b"late", timeout=30)
        status = running.process.wait(spec["terminationGracePeriodSeconds"])
        took_s = time.monotonic() - told

    assert while_loading == {"startup": 503, "liveness": 200, "readiness": 503}
    assert loaded == {"startup": 200, "liveness": 200, "readiness": 200}
    assert bound == {8080: "0.0.0.0", 8081: "127.0.0.1", 8082: "0.0.0.0", 7070: "0.0.0.0", 7071: "127.0.0.1"}
    assert predicted.content == b"one"
    assert 'marserve_request_seconds_count{model="gated"' in page
    assert (ending["liveness"], ending["readiness"]) == (200, 503)
    assert (late.status_code, late.content) == (200, b"late")
    assert status == 0
    assert took_s < spec["terminationGracePeriodSeconds"] - pod["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert paths_below(claim) == before
    assert not any("weights.bin" in path for path in unpacked)


def test_the_init_container_fills_the_pod_that_then_serves(tmp_path: Path, s3: S3Server) -> None:
    """From a bucket, with the credentials of its secret; started once more it finds what it fetched."""
    [patch] = file_of("kubernetes/components/fetch-models/deployment.yaml")
    spec = patch["spec"]["template"]["spec"]
    [fetching] = spec["initContainers"]
    [pod] = file_of("kubernetes/base/deployment.yaml")[0]["spec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in fetching["volumeMounts"]}
    volume = tmp_path / "volume"
    volume.mkdir()
    container = Container(tmp_path / "pod", {mounts["models"]: volume})
    put_config(container)
    archive = make_archive(tmp_path / "digits.mar", ECHO, config="minWorkers: 1\nmaxWorkers: 1\n")
    bucket_named(s3, "models").put("digits.mar", archive.read_bytes())

    first, second = (container.run(fetching["args"], s3.environment) for _ in range(2))
    with container.running(pod["args"], variables_of(pod)) as running:
        running.wait_until(8080, "/readyz")
        answer = httpx.post(container.url(8080, "/predictions/digits"), content=b"1", timeout=30)

    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.startswith("digits.mar fetched from s3://models/digits.mar, sha256 ")
    assert second.stdout == "digits.mar is there already\n"
    assert [path.name for path in volume.iterdir()] == ["digits.mar"]
    assert answer.content == b"1"


def test_a_pod_on_the_volume_of_torchserves_chart_serves_as_it_did(tmp_path: Path) -> None:
    """Its command, its paths, and a file as in the chart's documentation: with tokens on, nobody else manages."""
    [pod] = file_of("kubernetes/overlays/from-chart/deployment.yaml")[0]["spec"]["template"]["spec"]["containers"]
    [mount] = [each["mountPath"] for each in pod["volumeMounts"] if each.get("readOnly")]
    volume = tmp_path / "efs"
    (volume / "model-store").mkdir(parents=True)
    make_archive(volume / "model-store" / "echo.mar", ECHO)
    container = Container(tmp_path / "pod", {mount: volume})
    container.write(f"{mount}/config/config.properties", CHART_CONFIG)
    before = paths_below(volume)

    with container.running(pod["args"], variables_of(pod)) as running:
        running.wait_until(8080, "/readyz")
        answer = httpx.post(container.url(8080, "/predictions/echo"), content=b"as ever", timeout=30)
        managed = httpx.get(container.url(8081, "/models"), timeout=30)
        page = running.get(8082, "/metrics").text

    assert answer.content == b"as ever"
    assert managed.status_code == 400
    assert managed.json()["type"] == "InvalidKeyException"
    assert "ts_inference_requests_total" in page
    assert paths_below(volume) == before


def test_a_pod_that_cannot_load_a_model_ends_with_its_reason(tmp_path: Path) -> None:
    """So a roll-out of it stands still, and the pods before it go on serving."""
    [pod] = file_of("kubernetes/base/deployment.yaml")[0]["spec"]["template"]["spec"]["containers"]
    container = Container(tmp_path / "pod")
    put_config(container)
    (container.path("/home/model-server/model-store") / "torn.mar").write_bytes(b"no archive")

    ended = container.run(pod["args"], variables_of(pod))

    assert ended.returncode == 1
    assert "torn.mar" in ended.stderr.splitlines()[-1]


def bucket_named(s3: S3Server, name: str) -> Bucket:
    """The stand-in's bucket of this name, made where it is missing."""
    bucket = Bucket(s3.url, name)
    made = httpx.put(f"{s3.url}/{name}")
    assert made.status_code in (200, 409), made.text
    return bucket


# ------------------------------------------------------------------------------------------------------------ KServe

# As KServe's documentation has it for TorchServe: one shared port, on all addresses, and a snapshot.
BUCKET_CONFIG = """
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_metrics_api=true
metrics_format=prometheus
number_of_netty_threads=4
job_queue_size=10
enable_envvars_config=true
install_py_dep_per_model=true
model_store=/mnt/models/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"double":{"1.0":{"defaultVersion":true,"marName":"double.mar","minWorkers":1,"maxWorkers":1,"batchSize":1,"maxBatchDelay":10,"responseTimeout":60}}}}
"""
ROUTES = {
    "v1": (
        "/v1/models/double:predict",
        {"instances": [1, 2]},
        ("/v1/models/double", {"name": "double", "ready": True}),
    ),
    "v2": (
        "/v2/models/double/infer",
        {"inputs": [{"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]}]},
        ("/v2/health/ready", {"ready": True}),
    ),
}


@pytest.mark.parametrize(
    ("file", "label", "protocol"),
    [
        ("base/runtime-v1", None, "v1"),
        ("base/runtime-v2", None, "v2"),
        ("base/runtime-grpc-v2", None, "grpc-v2"),
        ("in-place-of-torchserve/runtime", "kserve", "v1"),
        pytest.param("in-place-of-torchserve/runtime", "kservev2", "v2", marks=pytest.mark.long),
    ],
)
def test_a_runtime_of_kserve_serves_torchserves_bucket(
    tmp_path: Path, file: str, label: str | None, protocol: str
) -> None:
    """The runtime says where the server listens and how requests are wrapped, whatever the bucket's file says."""
    [runtime] = file_of(f"kserve/{file}.yaml")
    [pod] = runtime["spec"]["containers"]
    [port] = pod["ports"]
    storage = tmp_path / "storage"
    (storage / "model-store").mkdir(parents=True)
    make_archive(storage / "model-store" / "double.mar", DOUBLE)
    container = Container(tmp_path / "pod", {"/mnt/models": storage})
    container.write("/mnt/models/config/config.properties", BUCKET_CONFIG)
    before = paths_below(storage)
    variables = {
        name: value.replace("{{.Labels.serviceEnvelope}}", str(label)) for name, value in variables_of(pod).items()
    }

    with container.running(pod["args"], variables) as running:
        running.wait_until(8080, "/readyz")
        bound = listeners(running)
        if protocol == "grpc-v2":
            assert is_serving(container, pod["readinessProbe"]["grpc"]["port"])
            outputs = infer(container, port["containerPort"])
        else:
            assert running.get(port["containerPort"], pod["readinessProbe"]["httpGet"]["path"]).status_code == 200
            route, question, ready = ROUTES[protocol]
            outputs = httpx.post(container.url(8080, route), json=question, timeout=30).json()
            assert ready[1].items() <= running.get(8080, ready[0]).json().items()
        page = running.get(int(runtime["spec"]["annotations"]["prometheus.kserve.io/port"]), "/metrics").text

    assert bound[port["containerPort"]] == "0.0.0.0"
    assert bound[8081] == "127.0.0.1"
    if protocol == "v1":
        assert outputs == {"predictions": [2, 4]}
    elif protocol == "v2":
        assert [output["data"] for output in outputs["outputs"]] == [[2, 4]]
    else:
        assert outputs == [[2, 4]]
    assert "ts_inference_requests_total" in page
    assert paths_below(storage) == before


@pytest.mark.long
def test_two_models_of_a_bucket_are_served_each_with_what_it_requires(tmp_path: Path) -> None:
    """`load_models=all` and `install_py_dep_per_model=true`, as in TorchServe's examples; the bucket is only read."""
    [pod] = file_of("kserve/base/runtime-v1.yaml")[0]["spec"]["containers"]
    storage = tmp_path / "storage"
    (storage / "model-store").mkdir(parents=True)
    make_archive(storage / "model-store" / "double.mar", DOUBLE)
    wheel = write_wheel(tmp_path, "tiny")
    document = {"model": {"modelName": "needs", "handler": "handler.py", "requirementsFile": "requirements.txt"}}
    with zipfile.ZipFile(storage / "model-store" / "needs.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", **document}))
        archive.writestr("handler.py", f"import tiny\n{DOUBLE.replace('2 * value', '[tiny.version, value]')}")
        archive.writestr("requirements.txt", f"--no-index\n./{wheel.name}\n")
        archive.write(wheel, wheel.name)
    container = Container(tmp_path / "pod", {"/mnt/models": storage})
    lines = BUCKET_CONFIG.splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("model_snapshot=")) + "load_models=all\n"
    container.write("/mnt/models/config/config.properties", text)
    before = paths_below(storage)

    with container.running(pod["args"], variables_of(pod)) as running:
        running.wait_until(8080, "/readyz")
        answers = [
            httpx.post(container.url(8080, f"/v1/models/{name}:predict"), json={"instances": [3]}, timeout=30).json()
            for name in ("double", "needs")
        ]

    assert answers == [{"predictions": [6]}, {"predictions": [["1.0", 3]]}]
    assert paths_below(storage) == before


def is_serving(container: Container, port: int) -> bool:
    """What the kubelet's gRPC probe asks."""
    answer = Schema().message("grpc.health.v1.HealthCheckResponse")
    with grpc.insecure_channel(f"127.0.0.1:{container.ports[port]}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", response_deserializer=answer.FromString)
        return bool(check(b"", timeout=30).status == answer.SERVING)


def infer(container: Container, port: int) -> list[list[int]]:
    """One call of the Open Inference Protocol, by its standard's name, as KServe's clients make it."""
    schema = Schema()
    ask, answer = (schema.message(f"inference.ModelInfer{side}") for side in ("Request", "Response"))
    tensor = {"name": "x", "shape": [2], "datatype": "INT64", "contents": {"int64_contents": [1, 2]}}
    with grpc.insecure_channel(f"127.0.0.1:{container.ports[port]}") as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=ask.SerializeToString,
            response_deserializer=answer.FromString,
        )
        answered = call(ask(model_name="double", inputs=[tensor]), timeout=30)
    return [list(output.contents.int64_contents) for output in answered.outputs]


def test_the_examples_name_runtimes_that_there_are() -> None:
    """And speak the protocol that theirs speaks."""
    runtimes = {
        document["metadata"]["name"]: document["spec"]
        for file in ("runtime-v1", "runtime-v2", "runtime-grpc-v2")
        for document in file_of(f"kserve/base/{file}.yaml")
    }
    for example in ("v1", "v2", "grpc-v2"):
        [service] = file_of(f"kserve/examples/{example}.yaml")
        model = service["spec"]["predictor"]["model"]
        runtime = runtimes[model["runtime"]]

        assert model["protocolVersion"] in runtime["protocolVersions"]
        assert model["modelFormat"]["name"] in [each["name"] for each in runtime["supportedModelFormats"]]
