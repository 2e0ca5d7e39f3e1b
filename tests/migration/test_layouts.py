"""Surveys of layouts as platforms have them: KServe's bucket, SageMaker's container, and the contract's archives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.archives import manifest, zip_of
from support.surveys import actions, look, write

MAKE_FIXTURES = Path(__file__).parents[1] / "contract" / "fixtures" / "make_fixtures.py"
GOOD = b"def handle(data, context):\n    return data\n"


# ------------------------------------------------------------------------------------------------------- KServe

VERSION = {"defaultVersion": True, "minWorkers": 1, "maxWorkers": 5, "batchSize": 1, "maxBatchDelay": 10}
KSERVE = """\
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_metrics_api=true
metrics_format=prometheus
metrics_mode=prometheus
number_of_netty_threads=4
job_queue_size=10
enable_envvars_config=true
install_py_dep_per_model=true
disable_token_authorization=true
model_store=/mnt/models/model-store
model_snapshot={snapshot}
"""
RUNTIME = """\
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
spec:
  containers:
    - name: kserve-container
      image: example.org/marserve:latest
      args:
        - torchserve
        - --start
        - --model-store=/mnt/models/model-store
        - --ts-config=/mnt/models/config/config.properties
      env:
        - name: TS_SERVICE_ENVELOPE
          value: kservev2
"""


def make_kserve(root: Path, *archives: str) -> None:
    """The bucket, with a snapshot of these archives in its settings."""
    models = {name: {"1.0": {**VERSION, "marName": f"{name}.mar"}} for name in archives}
    snapshot = json.dumps({"name": "startup.cfg", "modelCount": len(models), "models": models})
    write(root, {"config/config.properties": KSERVE.format(snapshot=snapshot), "runtime.yaml": RUNTIME})
    (root / "model-store").mkdir()
    archive = zip_of({"h.py": GOOD, "MAR-INF/MANIFEST.json": manifest("digits")})
    (root / "model-store" / "digits.mar").write_bytes(archive)


def test_kserves_bucket_needs_nothing(tmp_path: Path) -> None:
    """One shared port, the snapshot in the settings, the old and the new name of the metrics' mode, flags with `=`."""
    make_kserve(tmp_path, "digits")

    found = {each.place: each for each in look(tmp_path)}

    assert actions(tmp_path) == {}
    assert found["config/config.properties:7"].verdict == "differs"
    assert found["runtime.yaml:13"].what == "TS_SERVICE_ENVELOPE=kservev2"
    assert found["runtime.yaml:8"].verdict == "works"


def test_a_model_that_the_bucket_lacks_is_found_in_its_settings(tmp_path: Path) -> None:
    """The server would not start."""
    make_kserve(tmp_path, "digits", "lost")

    assert actions(tmp_path) == {"config/config.properties:15": "lost 1.0 is lost.mar, which is in no store here"}


def test_a_model_that_is_fetched_by_its_address_is_not_missing(tmp_path: Path) -> None:
    """A snapshot of ours has the address of what got no name in the store."""
    make_kserve(tmp_path, "digits", f"https://models.example.org/far.mar#sha256={'a' * 64}")
    text = (tmp_path / "config" / "config.properties").read_text()
    assert "far.mar" in text

    assert actions(tmp_path) == {}


# ---------------------------------------------------------------------------------------------------- SageMaker

SAGEMAKER = """\
vmargs=-Xmx4g
model_store=$$SAGEMAKER_MODEL_STORE$$
inference_address=http://0.0.0.0:$$SAGEMAKER_BIND_TO_PORT$$
management_address=http://0.0.0.0:$$SAGEMAKER_BIND_TO_PORT$$
default_response_timeout=$$SAGEMAKER_RESPONSE_TIMEOUT$$
default_workers_per_model=$$SAGEMAKER_NUM_MODEL_WORKERS$$
default_service_handler=$$SAGEMAKER_HANDLER$$
max_response_size=$$SAGEMAKER_MAX_RESPONSE_SIZE$$
max_request_size=$$SAGEMAKER_MAX_REQUEST_SIZE$$
decode_input_request=false
enable_envvars_config=true
load_models=ALL
disable_token_authorization=true
"""
TOOLKIT = """\
#!/bin/sh
torch-model-archiver --model-name model --version 1 --handler handler_service.py --export-path /.sagemaker/ts/models
torchserve --start --model-store /.sagemaker/ts/models --ts-config /etc/sagemaker-ts.properties \\
    --log-config /etc/log4j.properties --models model.mar
"""


def test_sagemakers_container_needs_nothing(tmp_path: Path) -> None:
    """The platform sets its variables, and its toolkit makes store and archive before the server starts."""
    write(tmp_path, {"etc/sagemaker-ts.properties": SAGEMAKER, "toolkit.sh": TOOLKIT, "code/inference.py": "x = 1\n"})

    found = look(tmp_path)

    assert actions(tmp_path) == {}
    assert any(each.place == "toolkit.sh:3" and "--log-config" in each.what for each in found)


def test_a_variable_that_nobody_is_known_to_set_is_named(tmp_path: Path) -> None:
    """Without it the server does not start; a start script that sets it is enough."""
    write(tmp_path, {"config.properties": "model_store=store\njob_queue_size=$$QUEUE$$\n"})
    (tmp_path / "store").mkdir()

    without = [
        each.what for each in look(tmp_path) if each.place == "config.properties:2" and each.verdict == "differs"
    ]
    write(tmp_path, {"start.sh": "export QUEUE=20\ntorchserve --start\n"})
    with_it = [
        each.what for each in look(tmp_path) if each.place == "config.properties:2" and each.verdict == "differs"
    ]

    assert without == ["job_queue_size needs the variable QUEUE; without it the server does not start"]
    assert with_it == []


def test_variables_do_not_count_where_no_settings_let_them(tmp_path: Path) -> None:
    """They do nothing there either, which is worth knowing."""
    write(tmp_path, {"config.properties": "model_store=store\n", "start.sh": "export TS_JOB_QUEUE_SIZE=20\n"})
    (tmp_path / "store").mkdir()

    (found,) = [each for each in look(tmp_path) if each.place == "start.sh:1"]

    assert found.verdict == "differs"
    assert "enable_envvars_config=true" in found.what


# ------------------------------------------------------------------------------------------------------- templates


def test_a_template_that_is_no_yaml_yet_is_read_by_lines(tmp_path: Path) -> None:
    """Helm's charts; what is filled in later is no problem."""
    chart = """\
{{- if .Values.enabled }}
image: pytorch/torchserve:0.12.0-gpu
args: ["torchserve", "--start", "--model-store", "{{ .Values.store }}", "--no-such-flag"]
{{- end }}
"""
    write(tmp_path, {"templates/deployment.yaml": chart, "config.properties": "metrics_mode=prometheus\n"})

    found = actions(tmp_path)

    assert list(found) == ["templates/deployment.yaml:2"]


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("run.sh", "export TS_VERSION=0.12.0\npip download torch==${TS_VERSION}\n", {}),
        ("run.sh", "echo TS_HOME is where it is\n", {}),
        ("Dockerfile", "FROM x\nENV TS_NOTHING yes\n", {"Dockerfile:2": "TS_NOTHING"}),
        ("run.bat", "REM torchserve --no-such-flag\n", {}),
        ("server.env", "TS_NOTHING=1\n", {"server.env:1": "TS_NOTHING"}),
        ("compose.yaml", "x:\n  environment:\n    - TS_NOTHING=1\n", {"compose.yaml:3": "TS_NOTHING"}),
        ("compose.yaml", "x:\n  command: torchserve --start --no-such-flag\n", {"compose.yaml:2": "--no-such-flag"}),
        (
            "pod.yaml",
            "command: [sh, -c]\nargs:\n  - |\n    set -e\n    torchserve --start --no-such-flag\n",
            {"pod.yaml:5": "--no-such-flag"},
        ),
        ("pod.yaml", "env:\n  - name: TS_NOTHING\n    valueFrom: {x: y}\n", {"pod.yaml:2": "TS_NOTHING"}),
        ("other.yaml", "name: torchserve\nimage: nginx\n", {}),
        ("environment.yml", "dependencies:\n  - pytorch::torchserve=0.9\n", {"environment.yml:2": "torchserve"}),
        (
            "pyproject.toml",
            'description = "on torchserve"\ndependencies = ["torchserve>=0.9"]\n',
            {"pyproject.toml:2": "t"},
        ),
        ("requirements-dev.txt", "torchserve-plugin\nmy-torchserve\n# torchserve\n", {}),
    ],
)
def test_each_form_of_a_start_is_read(tmp_path: Path, name: str, text: str, wanted: dict[str, str]) -> None:
    """What is wrong is found at its line, and nothing where nothing is."""
    write(tmp_path, {name: text, "config.properties": "model_store=store\nenable_envvars_config=true\n"})
    (tmp_path / "store").mkdir()

    found = actions(tmp_path)

    assert found.keys() == wanted.keys()
    assert all(wanted[place] in what for place, what in found.items())


def test_a_store_that_nobody_names_is_missing(tmp_path: Path) -> None:
    """Neither the command nor the settings do."""
    write(tmp_path, {"config.properties": "metrics_mode=prometheus\n", "start.sh": "torchserve --start --ncs\n"})

    assert actions(tmp_path) == {"start.sh:1": "no model store is named, here or in the settings"}


def test_yaml_that_nests_without_end_is_bounded(tmp_path: Path) -> None:
    """A deployment's file is somebody else's."""
    deep = "torchserve: " + "[" * 2000 + "]" * 2000
    bomb = "a: &a [torchserve, torchserve]\n" + "".join(
        f"{chr(98 + at)}: &{chr(98 + at)} [*{chr(97 + at)}, *{chr(97 + at)}, *{chr(97 + at)}]\n" for at in range(20)
    )
    write(tmp_path, {"deep.yaml": deep, "bomb.yaml": bomb, "config.properties": "metrics_mode=prometheus\n"})

    assert actions(tmp_path) == {}


# --------------------------------------------------------------------------------------- the contract's archives

# Archives of the contract that are wrong in a way that can be read, and where. All others must need nothing.
WRONG = {
    "bad_json.mar": "signature.json",
    "bad_runtime.mar": "runtime is 'ruby'",
    "bad_yaml.war": "yaml",
    "config_bad.mar": "no YAML",
    "config_odd.mar": "minWorkers is 'two'",
    "cycle.war": "there is a loop: add1, then add10, then add1",
    "empty.mar": "no handler",
    "func_unknown.mar": "no_such_function",
    "linear_nofile.mar": "gone.pt",
    "lost_model.war": "there_is_no_such_archive.mar",
    "missing_handler.mar": "gone.py",
    "needs_missing.mar": "contractkit-there-is-no-such-package",
    "no_handler_entry.mar": "no handler",
    "no_manifest.mar": "no handler",
    "no_manifest.war": "WAR-INF/MANIFEST.json",
    "no_model.mar": "no handler",
    "no_spec.war": "specFile",
    "not_zip.mar": "neither a zip file",
    "null_model.mar": "no handler",
    "slip.mar": "outside of the archive",
    "syntax_error.mar": "no Python",
    "truncated.mar": "no end record",
}
# Made without torch, these hold no weights.
NEED_TORCH = {"kinds.mar", "linear_nofile.mar", "mnist_eager.mar", "mnist_script.mar", "mnist_onnx.mar"}


@pytest.fixture(scope="module")
def contract(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract's archives that need no torch to be made."""
    folder = tmp_path_factory.mktemp("fixtures")
    command = [sys.executable, MAKE_FIXTURES, folder, "--no-torch"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


def test_of_the_contracts_archives_those_that_are_wrong_are_found_and_no_others(contract: Path) -> None:
    """Each for what is wrong with it."""
    found: dict[str, list[str]] = {}
    for each in look(contract):
        if each.verdict == "action":
            found.setdefault(each.file.partition("!")[0], []).append(each.what)
    made = {path.name for path in contract.iterdir()}

    assert found.keys() - NEED_TORCH == (WRONG.keys() & made) - NEED_TORCH
    for name in found.keys() - NEED_TORCH:
        assert any(WRONG[name] in what for what in found[name]), (name, found[name])
