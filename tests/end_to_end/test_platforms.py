"""Platforms that run TorchServe's command in their own way: KServe, SageMaker and Vertex AI, as they call and ask."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from support.server import free_ports, make_archive, poll

DOUBLE = """
import json
def handle(data, context):
    rows = [row.get("body", row.get("data")) if isinstance(row, dict) else row for row in data or []]
    return [2 * (json.loads(bytes(row)) if isinstance(row, (bytes, bytearray)) else row) for row in rows]
"""

ECHO = """
def handle(data, context):
    return [bytes(row.get("body") or row.get("data")) for row in data or []]
"""


@dataclass
class Started:
    """A server that was started as the platform starts it."""

    process: subprocess.Popen[bytes]
    base: str
    folder: Path

    def get(self, path: str, **more: str) -> httpx.Response:
        """One GET."""
        return httpx.get(f"{self.base}{path}", timeout=30, **more)  # type: ignore[arg-type]

    def wait_until(self, path: str, status: int = 200) -> None:
        """Ask until the answer has this status."""
        for _ in poll(60, f"{path} answers {status}"):
            assert self.process.poll() is None, (self.folder / "console.log").read_text()
            with contextlib.suppress(httpx.TransportError):
                if self.get(path).status_code == status:
                    return


@contextlib.contextmanager
def started(folder: Path, base: str, words: Sequence[str], environment: Mapping[str, str]) -> Iterator[Started]:
    """Run `torchserve WORDS…` in this folder, in front; end it as a platform does, with SIGTERM."""
    (folder / "tmp").mkdir()
    inherited = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TS_", "MARSERVE_", "AIP_", "SAGEMAKER_"))
    }
    with (folder / "console.log").open("wb") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "marserve.cli.torchserve", "--start", "--foreground", *words],
            cwd=folder,
            env=inherited | {"TMPDIR": str(folder / "tmp"), "TEMP": str(folder / "tmp")} | environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    family: list[psutil.Process] = []
    try:
        yield Started(process, base, folder)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"left running: {alive}"


def write_properties(path: Path, lines: Mapping[str, object]) -> Path:
    """A settings file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    return path


# ------------------------------------------------------------------------------------------------------- KServe


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


@pytest.mark.parametrize(
    ("envelope", "asked", "expected"),
    [("", 4, 8), ("kserve", {"instances": [1, 2]}, {"predictions": [2, 4]})],
    ids=["none", "kserve"],
)
def test_kserve_starts_its_layout_and_its_wrapper_gets_through(
    tmp_path: Path, envelope: str, asked: object, expected: object
) -> None:
    """The mounted bucket, the flags with `=`, one shared port, the envelope from the environment (perhaps empty)."""
    port, metrics_port, grpc_port, grpc_management_port = free_ports(4)
    (tmp_path / "model-store").mkdir()
    make_archive(tmp_path / "model-store" / "double.mar", DOUBLE, config="minWorkers: 1\nmaxWorkers: 1\n")
    write_properties(
        tmp_path / "config" / "config.properties",
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
            "model_store": tmp_path / "model-store",
            "load_models": "all",
            "model_snapshot": json.dumps(KSERVE_SNAPSHOT),
        },
    )
    words = [
        f"--model-store={tmp_path}/model-store",
        f"--ts-config={tmp_path}/config/config.properties",
        "--disable-token-auth",
    ]
    environment = {"TS_SERVICE_ENVELOPE": envelope, "PROTOCOL_VERSION": "v1"}
    with started(tmp_path, f"http://127.0.0.1:{port}", words, environment) as server:
        # The wrapper polls until a worker says READY, then forwards.
        for _ in poll(60, "a worker is READY"):
            with contextlib.suppress(httpx.TransportError):
                described = server.get("/models/double?customized=false")
                if described.status_code == 200 and "READY" in [w["status"] for w in described.json()[0]["workers"]]:
                    break
        answer = httpx.post(f"{server.base}/predictions/double", json=asked, timeout=30)
        direct = httpx.post(f"{server.base}/v1/models/double:predict", json=asked, timeout=30)
        ready = server.get("/v1/models/double")
        restored = server.get("/models/double").json()[0]
        page = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics")

    assert answer.json() == direct.json() == expected
    assert ready.json() == {"name": "double", "ready": True}
    assert (restored["maxWorkers"], restored["maxBatchDelay"], restored["responseTimeout"]) == (2, 500, 60)
    assert "ts_inference_requests_total" in page.text


# ---------------------------------------------------------------------------------------------------- SageMaker


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


# ---------------------------------------------------------------------------------------------------- Vertex AI


def test_vertex_is_answered_at_the_port_and_paths_it_names(tmp_path: Path) -> None:
    """Nothing else is configured: its three variables are enough."""
    (tmp_path / "store").mkdir()
    make_archive(tmp_path / "store" / "model.mar", DOUBLE, config="minWorkers: 1\nmaxWorkers: 1\n")
    port, management_port, metrics_port, grpc_port, grpc_management_port = free_ports(5)
    settings = write_properties(
        tmp_path / "vertex.properties",
        {
            "management_address": f"http://127.0.0.1:{management_port}",
            "metrics_address": f"http://127.0.0.1:{metrics_port}",
            "grpc_inference_port": grpc_port,
            "grpc_management_port": grpc_management_port,
            "service_envelope": "json",
        },
    )
    words = ["--model-store", "store", "--ts-config", str(settings), "--models", "model=model.mar"]
    environment = {
        "AIP_HTTP_PORT": str(port),
        "AIP_HEALTH_ROUTE": "/v1/endpoints/17/deployedModels/4",
        "AIP_PREDICT_ROUTE": "/v1/endpoints/17/deployedModels/4:predict",
    }
    arguments = [*words, "--disable-token-auth"]
    with started(tmp_path, f"http://127.0.0.1:{port}", arguments, environment) as server:
        server.wait_until(environment["AIP_HEALTH_ROUTE"])
        answer = httpx.post(
            f"{server.base}{environment['AIP_PREDICT_ROUTE']}", json={"instances": [1, 2, 3]}, timeout=30
        )
        usual = httpx.post(f"{server.base}/predictions/model", json={"instances": [1, 2, 3]}, timeout=30)

    assert answer.json() == usual.json() == {"predictions": [2, 4, 6]}


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
