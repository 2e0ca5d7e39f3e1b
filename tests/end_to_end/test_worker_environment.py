"""What a worker of a real server finds around it: working directory, path, variables (contract 8.7)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from support.inventory import inventory
from support.server import Server, make_archive

HANDLER = """
import json, os, sys

def handle(data, context):
    if data is None:
        return None
    return [{
        "environment": dict(os.environ),
        "path": sys.path,
        "folder": os.getcwd(),
        "properties": {k: v for k, v in context.system_properties.items() if k != "limit_max_image_pixels"},
    }]
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a worker said, of a server with a variable to hide, one to show, and a `PYTHONPATH`."""
    folder = tmp_path_factory.mktemp("server")
    surroundings = {
        "SHOWN_TO_WORKERS": "yes",
        "HIDDEN_SECRET": "no",
        "HIDDEN": "no",
        "NOT_HIDDEN_AS_A_WHOLE": "yes",
        "PYTHONPATH": str(folder / "inherited"),
        "ENABLE_TORCH_PROFILER": "",
    }
    settings = {
        "blacklist_env_vars": "HIDDEN(_SECRET)?",
        "decode_input_request": "false",
        "default_workers_per_model": "1",
    }
    store = folder / "store"
    store.mkdir()
    make_archive(store / "m.mar", HANDLER)
    with Server(folder, store=store, settings=settings, environment=surroundings) as server:
        assert server.register("m.mar").status_code == 200
        answer: dict[str, Any] = server.client.post(f"{server.inference}/predictions/m", content=b"x").json()
    return {**answer, "inherited": surroundings["PYTHONPATH"]}


def test_hidden_variables_are_hidden_by_their_whole_name(found: dict[str, Any]) -> None:
    """`blacklist_env_vars` is a pattern of whole names; everything else is the server's own."""
    environment = found["environment"]

    assert {"HIDDEN", "HIDDEN_SECRET"}.isdisjoint(environment)
    assert environment["SHOWN_TO_WORKERS"] == environment["NOT_HIDDEN_AS_A_WHOLE"] == "yes"
    assert environment["PATH"] == os.environ["PATH"]


def test_the_archive_is_the_working_directory_and_early_on_the_path(found: dict[str, Any]) -> None:
    """Behind what was inherited, before `ts` and everything installed; programs it starts have the same."""
    folder = found["folder"]

    assert found["properties"]["model_dir"] == folder
    assert Path(folder).is_absolute()
    assert found["path"][:2] == [found["inherited"], folder]
    assert found["path"][2].endswith("ts_compat")
    assert found["environment"]["PYTHONPATH"].split(os.pathsep) == found["path"][:3]


def test_system_properties_are_torchserves(found: dict[str, Any]) -> None:
    """With the name that handlers may ask for."""
    properties = found["properties"]

    assert (properties["gpu_id"], properties["batch_size"], properties["server_name"]) == (None, 1, "MMS")
    assert properties["server_version"]


# Of each variable in TorchServe's list of what workers see: its value here, or why it is not there.
WORKER_ENVIRONMENT = {
    "TS_DECODE_INPUT_REQUEST": "false",
    "TS_IPEX_ENABLE": "false",
    "TS_IPEX_GPU_ENABLE": "false",
    "TS_REQUEST_SEQUENCE_ID": "ts_request_sequence_id",
    "TS_REQUEST_SEQUENCE_START": "ts_request_sequence_start",
    "TS_REQUEST_SEQUENCE_END": "ts_request_sequence_end",
    "ENABLE_TORCH_PROFILER": "",
}
SET_ELSEWHERE = {
    "PYTHONPATH": "test_the_archive_is_the_working_directory_and_early_on_the_path",
    "CUDA_VISIBLE_DEVICES": "with parallelism only: tests/machine/test_devices.py",
    "HIP_VISIBLE_DEVICES": "with parallelism only: tests/machine/test_devices.py",
    "XPU_VISIBLE_DEVICES": "with parallelism only: tests/machine/test_devices.py",
    "LOGLEVEL": "of groups only: tests/pool/test_groups.py",
    "OMP_NUM_THREADS": "of groups only: tests/pool/test_groups.py",
    "LOCAL_RANK": "of groups only: tests/pool/test_groups.py",
    "RANK": "of groups only: tests/pool/test_groups.py",
    "WORLD_SIZE": "of groups only: tests/pool/test_groups.py",
    "LOCAL_WORLD_SIZE": "of groups only: tests/pool/test_groups.py",
    "TS_BENCHMARK": "passed on; marserve has no profiler of its own in workers, py-spy needs no restart",
    "VLLM_WORKER_MULTIPROC_METHOD": "set by the vLLM handler itself: tests/handlers",
}

# What TorchServe reads of the environment, and what does here.
SERVER_ENVIRONMENT = {
    "TS_CONFIG_FILE": "names the configuration: tests/settings/test_load.py",
    "TS_MODEL_SERVER_HOME": "the key model_server_home",
    "TS_OPEN_INFERENCE_PROTOCOL": "the key ts_open_inference_protocol",
    "LOG_LOCATION": "the key log_location",
    "METRICS_LOCATION": "the key metrics_location",
    "TEMP": "the key temporary_folder",
    "JAVA_HOME": "there is no Java",
    "PYTHONPATH": "test_the_archive_is_the_working_directory_and_early_on_the_path",
    "CUDA_VISIBLE_DEVICES": "bounds the devices: tests/machine/test_describe.py",
    "HIP_VISIBLE_DEVICES": "bounds the devices: tests/machine/test_describe.py",
    "XPU_VISIBLE_DEVICES": "bounds the devices: tests/machine/test_describe.py",
    "SM_TELEMETRY_LOG": "SageMaker's own counting of use; nothing is reported",
    "AWS_ACCESS_KEY_ID": "for object stores: tests/store/sources/test_object_settings.py",
    "AWS_SECRET_ACCESS_KEY": "for object stores: tests/store/sources/test_object_settings.py",
    "AWS_DEFAULT_REGION": "for object stores: tests/store/sources/test_object_settings.py",
    "SAGEMAKER_MULTI_MODE": "read with sagemaker_endpoints",
    "MXNETMODELSERVER_PROGRAM": "of TorchServe's ancestor; nothing reads it there either",
    "DOMAIN": "of TorchServe's ancestor; nothing reads it there either",
    "REALM": "of TorchServe's ancestor; nothing reads it there either",
}


def test_every_variable_of_torchserves_workers_is_accounted_for(found: dict[str, Any]) -> None:
    """By its value here, or by the reason that stands beside it."""
    listed = inventory("worker_env")

    for entry in listed:
        name = entry["name"]
        assert (name in WORKER_ENVIRONMENT) != (name in SET_ELSEWHERE), name
        if name in WORKER_ENVIRONMENT:
            assert found["environment"][name] == WORKER_ENVIRONMENT[name], name


def test_every_variable_of_torchserves_server_is_accounted_for() -> None:
    """Each has a meaning here, or a reason to have none."""
    listed = inventory("server_env")

    assert set(listed) == set(SERVER_ENVIRONMENT)
