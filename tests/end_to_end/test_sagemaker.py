"""SageMaker: the toolkit's command as it runs TorchServe, and a container of one's own, `docker run IMAGE serve`."""

from __future__ import annotations

import json
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from support.platforms import ImageHome, Started, started, write_properties
from support.server import free_ports, make_archive, poll
from support.wheels import write_wheel

ECHO = """
def handle(data, context):
    return [bytes(row.get("body") or row.get("data")) for row in data or []]
"""

TARGET = """
def handle(data, context):
    headers = context.get_all_request_header(0) if data else {}
    return [f"{context.model_name} {headers.get('X-Amzn-SageMaker-Target-Model')}" for row in data or []]
"""

SCRIPT = """
import json, os, tiny
def model_fn(model_dir):
    return int(open(os.path.join(model_dir, "code", "weights.txt")).read())
def input_fn(body, content_type):
    return json.loads(body)["inputs"]
def predict_fn(data, model):
    return [tiny.version, *(model * number for number in data)]
"""

# ------------------------------------------------------------------------------------ a container of one's own


@pytest.fixture
def image(tmp_path: Path) -> ImageHome:
    """An image's file system."""
    (tmp_path / "home").mkdir()
    return ImageHome(tmp_path / "home")


def ml(image: ImageHome) -> Path:
    """The folder that is `/opt/ml` in a container."""
    return image.folder.parent / "ml"


def as_sagemaker(image: ImageHome, **more: str) -> dict[str, str]:
    """What SageMaker sets for one of several containers of an endpoint."""
    return {
        "SAGEMAKER_BASE_DIR": str(ml(image)),
        "SAGEMAKER_BIND_TO_PORT": str(image.port),
        "SAGEMAKER_SAFE_PORT_RANGE": f"{image.further[0]}-{image.further[-1]}",
        "SAGEMAKER_REGION": "eu-west-1",
        "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
        **more,
    }


def unpacked(folder: Path, handler: str, **more: Any) -> Path:
    """An archive as SageMaker leaves it after unpacking `model.tar.gz`."""
    folder.mkdir(parents=True)
    archive = make_archive(folder.parent / "made.mar", handler, name="mine", **more)
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    archive.unlink()
    return folder


@pytest.mark.parametrize("kind", ["archive", "unpacked"])
def test_a_container_serves_the_model_that_sagemaker_put_into_opt_ml(image: ImageHome, kind: str) -> None:
    """`/ping` and `/invocations` on the port it was given, no key asked for, models not for others to manage."""
    if kind == "unpacked":
        unpacked(ml(image) / "model", ECHO)
    else:
        (ml(image) / "model").mkdir(parents=True)
        make_archive(ml(image) / "model" / "mine.mar", ECHO)
        (ml(image) / "model" / "read.me").write_text("no model")
    with image.serve(**as_sagemaker(image)) as server:
        server.wait_until("/ping")
        answer = server.post("/invocations", b"[1, 2]", **{"Content-Type": "application/x-image", "Accept": "*/*"})
        managed = httpx.get(f"http://127.0.0.1:{image.further[3]}/models", timeout=30)
        listens = {
            (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)
            for each in psutil.Process(server.server_pid()).net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }
        elsewhere = server.get("/models")

    assert (answer.status_code, answer.content) == (200, b"[1, 2]")
    assert elsewhere.status_code == 404
    assert [model["modelName"] for model in managed.json()["models"]] == ["mine"]
    assert listens == {("0.0.0.0", image.port), *(("127.0.0.1", port) for port in image.further)}


@pytest.mark.system
@pytest.mark.torch
def test_a_container_serves_an_inference_script_with_its_weights(image: ImageHome) -> None:
    """As SageMaker's PyTorch toolkit does, whose variables count; what the script requires is installed before it.

    The model's folder holds nothing but `code`, and is the model's folder all the same.
    """
    pytest.importorskip("torch")
    code = ml(image) / "model" / "code"
    code.mkdir(parents=True)
    (code / "inference.py").write_text(SCRIPT)
    write_wheel(code, "tiny")
    (code / "requirements.txt").write_text("--no-index\n--find-links .\ntiny\n")
    (code / "weights.txt").write_text("10")
    told = as_sagemaker(image, SAGEMAKER_TS_BATCH_SIZE="4", SAGEMAKER_MODEL_SERVER_WORKERS="1")
    with image.serve(**told) as server:
        server.wait_until("/ping")
        answer = server.post("/invocations", b'{"inputs": [1, 2]}', **{"Content-Type": "application/json"})
        described = httpx.get(f"http://127.0.0.1:{image.further[3]}/models/model", timeout=30).json()[0]

    assert (answer.status_code, answer.json()) == (200, ["1.0", 10, 20])
    assert answer.headers["content-type"] == "application/json"
    assert (described["batchSize"], described["minWorkers"]) == (4, 1)
    assert (described["requirements"]["status"], described["requirements"]["kind"]) == ("installed", "venv")


def load(server: Started, name: str, folder: Path) -> httpx.Response:
    """SageMaker's call for a model that it has put there."""
    body = json.dumps({"model_name": name, "url": str(folder)}).encode()
    return server.post("/models", body, **{"Content-Type": "application/json", "Accept": "application/json"})


def test_a_multi_model_endpoint_loads_lists_invokes_and_unloads(image: ImageHome) -> None:
    """SageMaker's contract for containers of many models, call by call."""
    greedy = unpacked(ml(image) / "models" / "9f" / "model", ECHO, config="memory: 900GiB\n")
    model = unpacked(ml(image) / "models" / "1c4a" / "model", TARGET)
    outside = unpacked(ml(image) / "elsewhere" / "model", ECHO)

    with image.serve(**as_sagemaker(image, SAGEMAKER_MULTI_MODEL="true")) as server:
        server.wait_until("/ping")
        at_first = server.get("/models")
        loaded = load(server, "1c4a", model)
        again = load(server, "1c4a", model)
        too_large = load(server, "9f", greedy)
        refused = [load(server, name, ml(image) / name / "model") for name in ("elsewhere", "gone")]
        assert outside.is_dir()
        listed = server.get("/models")
        one = server.get("/models/1c4a")
        answer = server.post("/models/1c4a/invoke", b"x", **{"X-Amzn-SageMaker-Target-Model": "a.tar.gz"})
        unloaded = httpx.delete(f"{server.base}/models/1c4a", timeout=30)
        after = [
            server.post("/models/1c4a/invoke", b"x"),
            server.get("/models/1c4a"),
            httpx.delete(f"{server.base}/models/1c4a", timeout=30),
        ]
        at_last = server.get("/models")
        ping = server.get("/ping")

    assert at_first.json() == at_last.json() == {"models": []}
    assert (loaded.status_code, loaded.json()["status"]) == (
        200,
        "Model 1c4a version 1.0 is registered, with 1 worker",
    )
    assert (again.status_code, too_large.status_code) == (409, 507)
    assert [each.status_code for each in refused] == [404, 404]
    assert listed.json() == {"models": [{"modelName": "1c4a", "modelUrl": str(model)}]}
    assert (one.status_code, one.json()[0]["modelName"], one.json()[0]["modelUrl"]) == (200, "1c4a", str(model))
    assert (answer.status_code, answer.text) == (200, "1c4a a.tar.gz")
    assert unloaded.status_code == 200
    assert [each.status_code for each in after] == [404, 404, 404]
    assert ping.status_code == 200


@pytest.mark.long
def test_models_come_and_go_under_traffic_and_nobody_else_notices(image: ImageHome) -> None:
    """Three loads and unloads: the other model always answers, this one while it is loaded, and 404 else."""
    models = {name: unpacked(ml(image) / "models" / name / "model", TARGET) for name in ("stays", "moves")}
    statuses: dict[str, list[tuple[float, float, int]]] = {name: [] for name in models}
    loaded: list[tuple[float, float]] = []
    is_over = threading.Event()

    def invoke(name: str) -> None:
        with httpx.Client(base_url=server.base, timeout=30) as client:
            while not is_over.is_set():
                begun = time.monotonic()
                answer = client.post(f"/models/{name}/invoke", headers={"X-Amzn-SageMaker-Target-Model": f"{name}.tgz"})
                assert answer.status_code != 200 or answer.text == f"{name} {name}.tgz"
                statuses[name].append((begun, time.monotonic(), answer.status_code))

    with image.serve(**as_sagemaker(image, SAGEMAKER_MULTI_MODEL="true")) as server, ThreadPoolExecutor(4) as clients:
        server.wait_until("/ping")
        assert load(server, "stays", models["stays"]).status_code == 200
        asking = [clients.submit(invoke, name) for name in (*models, *models)]
        try:
            for number in range(3):
                assert load(server, "moves", models["moves"]).status_code == 200
                since, known = time.monotonic(), len(statuses["moves"])
                for _ in poll(30, f"load {number} is seen by ten requests"):
                    if len(statuses["moves"]) >= known + 10:
                        break
                loaded.append((since, time.monotonic()))
                assert httpx.delete(f"{server.base}/models/moves", timeout=30).status_code == 200
        finally:
            is_over.set()
        for each in asking:
            each.result()

    assert {status for *_, status in statuses["stays"]} == {200}
    assert {status for *_, status in statuses["moves"]} == {200, 404}
    inside = [
        status
        for begun, ended, status in statuses["moves"]
        if any(since <= begun and ended <= until for since, until in loaded)
    ]
    assert len(inside) >= 15
    assert set(inside) == {200}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SAGEMAKER_BIND_TO_PORT": "abc"}, "SAGEMAKER_BIND_TO_PORT is 'abc'; it must be a whole number"),
        ({"MARSERVE_JOB_QUEUE_SIZE": "many"}, "job_queue_size is 'many'; it must be a whole number"),
        ({}, "model holds no model, only weights.safetensors: put an archive"),
    ],
)
def test_what_sagemaker_or_its_user_said_wrongly_ends_the_container(
    image: ImageHome, variables: dict[str, str], said: str
) -> None:
    """With status 2, one sentence in the log, and nothing left."""
    (ml(image) / "model").mkdir(parents=True)
    (ml(image) / "model" / "weights.safetensors").write_bytes(b"")
    if "MARSERVE_JOB_QUEUE_SIZE" in variables:
        make_archive(ml(image) / "model" / "mine.mar", ECHO)

    status, console = image.fail(**as_sagemaker(image, **variables))

    assert (status, "Traceback" in console) == (2, False)
    assert said in console
    assert list((image.folder / "tmp").iterdir()) == []


def test_a_model_that_cannot_be_loaded_ends_the_container_with_its_reason(image: ImageHome) -> None:
    """SageMaker shows the log; a container that waits for ever would tell nobody."""
    (ml(image) / "model").mkdir(parents=True)
    make_archive(ml(image) / "model" / "mine.mar", "raise ValueError('the weights are torn')\n")

    status, console = image.fail(**as_sagemaker(image, MARSERVE_DEFAULT_WORKERS_PER_MODEL="1"))

    assert status == 1
    assert "the weights are torn" in console
    assert list((image.folder / "tmp").iterdir()) == []


# --------------------------------------------------------------------------------------- the toolkit's command


def sagemaker_settings(folder: Path, **more: object) -> Path:
    """As the toolkit writes it: one port for everything, from the environment."""
    metrics_port, grpc_port, grpc_management_port = free_ports(3)
    return write_properties(
        folder / "etc" / "sagemaker-ts.properties",
        {
            "enable_envvars_config": "true",
            "decode_input_request": "false",
            "load_models": "ALL",
            "model_store": folder / "models",
            "inference_address": "http://0.0.0.0:$$SAGEMAKER_BIND_TO_PORT$$",
            "management_address": "http://0.0.0.0:$$SAGEMAKER_BIND_TO_PORT$$",
            "metrics_address": f"http://127.0.0.1:{metrics_port}",
            "grpc_inference_port": grpc_port,
            "grpc_management_port": grpc_management_port,
            "default_workers_per_model": "1",
            "default_response_timeout": "60",
            "vmargs": "-XX:-UseContainerSupport",
            "disable_token_authorization": "true",
            "enable_model_api": "true",
            **more,
        },
    )


def sagemaker_words(folder: Path, settings: Path) -> list[str]:
    """The toolkit's command."""
    log_config = folder / "etc" / "log4j.properties"
    log_config.write_text("log4j.rootLogger = WARN, console\n")
    store = folder / "models"
    return ["--model-store", str(store), "--ts-config", str(settings), "--log-config", str(log_config)]


def toolkit_finds(pid: int) -> bool:
    """Whether the toolkit would take this process for the server: the word is an argument by itself."""
    return "org.pytorch.serve.ModelServer" in psutil.Process(pid).cmdline()


def test_sagemaker_serves_one_model_on_one_port(tmp_path: Path) -> None:
    """`/ping` and `/invocations`, the process found by its title, ended by SIGTERM."""
    (tmp_path / "models").mkdir()
    make_archive(tmp_path / "models" / "model.mar", ECHO, version="1")
    (port,) = free_ports(1)
    words = [*sagemaker_words(tmp_path, sagemaker_settings(tmp_path)), "--models", "model.mar"]
    environment = {"SAGEMAKER_BIND_TO_PORT": str(port), "SM_TELEMETRY_LOG": "1"}
    with started(tmp_path, f"http://127.0.0.1:{port}", words, environment) as server:
        server.wait_until("/ping")
        answer = httpx.post(
            f"{server.base}/invocations", content=b"[1, 2]", headers={"content-type": "application/json"}, timeout=30
        )

        assert toolkit_finds(server.process.pid)
    assert answer.content == b"[1, 2]"


def test_sagemaker_hosts_many_models_through_the_same_port(tmp_path: Path) -> None:
    """Load, list, invoke, unload; and the plug-in's `/ping`, which asks for the shared handler only."""
    (tmp_path / "models").mkdir()
    make_archive(tmp_path / "models" / "one.mar", ECHO)
    (tmp_path / "service.py").write_text(ECHO)
    (port,) = free_ports(1)
    settings = sagemaker_settings(
        tmp_path,
        load_models="",
        sagemaker_endpoints="true",
        default_service_handler=f"{tmp_path}/service.py:handle",
        NUM_WORKERS="3",
        max_request_size=str(20 * 1024 * 1024),
    )
    environment = {"SAGEMAKER_BIND_TO_PORT": str(port), "SAGEMAKER_MULTI_MODE": "true"}
    words = sagemaker_words(tmp_path, settings)
    with started(tmp_path, f"http://127.0.0.1:{port}", words, environment) as server:
        server.wait_until("/ping")
        query = {"url": "one.mar", "initial_workers": 1, "synchronous": "true"}
        loaded = httpx.post(f"{server.base}/models", params=query, timeout=60)
        listed = server.get("/models")
        answer = httpx.post(f"{server.base}/models/one/invoke", content=b"hello", timeout=30)
        offered = server.get("/execution-parameters")
        unloaded = httpx.delete(f"{server.base}/models/one", timeout=30)
        (tmp_path / "service.py").unlink()
        missing = server.get("/ping")

    assert [each.status_code for each in (loaded, listed, answer, unloaded)] == [200] * 4
    assert [model["modelName"] for model in listed.json()["models"]] == ["one"]
    assert answer.content == b"hello"
    assert offered.json() == {"MaxConcurrentTransforms": 3, "BatchStrategy": "MULTI_RECORD", "MaxPayloadInMB": 20}
    assert (missing.status_code, missing.json()["message"]) == (503, "Service file unavailable")


def test_sagemakers_plug_in_says_healthy_once_a_model_is_loaded(tmp_path: Path) -> None:
    """And goes on saying so."""
    (tmp_path / "models").mkdir()
    make_archive(tmp_path / "models" / "late.mar", ECHO)
    (port,) = free_ports(1)
    settings = sagemaker_settings(tmp_path, load_models="", sagemaker_endpoints="true")
    words = sagemaker_words(tmp_path, settings)
    with started(tmp_path, f"http://127.0.0.1:{port}", words, {"SAGEMAKER_BIND_TO_PORT": str(port)}) as server:
        server.wait_until("/livez")
        before = server.get("/ping")
        query = {"url": "late.mar", "initial_workers": 1, "synchronous": "true"}
        httpx.post(f"{server.base}/models", params=query, timeout=60)
        after = server.get("/ping")
        httpx.delete(f"{server.base}/models/late", timeout=30)
        still = server.get("/ping")

    assert (before.status_code, before.json()["message"]) == (503, "Models are not loaded")
    assert (after.status_code, after.text) == (200, '{\n\t"Status": "Healthy"\n}\n')
    assert still.status_code == 200
