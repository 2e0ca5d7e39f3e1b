"""What SageMaker's variables and folders become, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marserve.cli.platforms.sagemaker import sagemaker_arguments
from marserve.errors import BadSettings
from support.server import make_archive


def settings(base: Path, **environment: str) -> dict[str, str]:
    """What the arguments set, in a container whose `/opt/ml` is this folder."""
    words = sagemaker_arguments(environment, base)
    assert words is not None
    assert words[:2] == ["start", "--foreground"]
    assert set(words[2::2]) == {"--set"}
    return dict(word.split("=", 1) for word in words[3::2])


def put(path: Path, text: str = "") -> Path:
    """A file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_elsewhere_there_is_nothing_to_say(tmp_path: Path) -> None:
    """A container that is told nothing of SageMaker is not in it."""
    assert sagemaker_arguments({"SAGEMAKER_MULTI_MODEL": "false"}, tmp_path) is None
    assert sagemaker_arguments({}, tmp_path) is None


def test_one_port_is_everybodys_and_the_others_are_the_containers_own(tmp_path: Path) -> None:
    """8080 if nothing else is said; of a range the ports that nobody else on the machine was given."""
    (tmp_path / "model").mkdir()

    plain = settings(tmp_path)
    told = settings(tmp_path, SAGEMAKER_BIND_TO_PORT="9000", SAGEMAKER_SAFE_PORT_RANGE="8999-9010")

    assert (plain["inference_address"], plain["management_address"]) == ("http://0.0.0.0:8080", "http://127.0.0.1:8081")
    assert plain["grpc_inference_address"] == plain["grpc_management_address"] == "127.0.0.1"
    assert told["inference_address"] == "http://0.0.0.0:9000"
    assert told["management_address"] == "http://127.0.0.1:9003"
    assert told["metrics_address"] == "http://127.0.0.1:8999"
    assert (told["grpc_inference_port"], told["grpc_management_port"]) == ("9001", "9002")
    assert "enable_model_api" not in plain


def test_a_multi_model_endpoint_is_managed_on_the_one_port(tmp_path: Path) -> None:
    """It begins with no model, and loads from the folders below `models`, archives or scripts, a worker for each."""
    told = settings(tmp_path, SAGEMAKER_MULTI_MODEL="true", SAGEMAKER_SAFE_PORT_RANGE="11000-11999")

    assert told["management_address"] == told["inference_address"] == "http://0.0.0.0:8080"
    assert (told["allow_open_management"], told["enable_model_api"]) == ("true", "true")
    assert (told["load_models"], told["model_roots"]) == ("", str(tmp_path / "models"))
    assert (told["default_workers_per_model"], told["default_service_handler"]) == ("1", "sagemaker_script")
    assert told["default_requirements_file"] == "code/requirements.txt"


def test_a_model_that_lies_unpacked_is_served_in_place(tmp_path: Path) -> None:
    """What `torch-model-archiver --archive-format tgz` made is unpacked by SageMaker."""
    folder = put(tmp_path / "model" / "MAR-INF" / "MANIFEST.json", "{}").parents[1]

    told = settings(tmp_path)

    assert (told["load_models"], told["model_roots"], told["strict_start"]) == (str(folder), str(tmp_path), "true")


def test_archives_are_loaded_and_nothing_beside_them(tmp_path: Path) -> None:
    """Files of a tar archive that are no models do no harm."""
    put(tmp_path / "model" / "notes.txt")
    put(tmp_path / "model" / "folder" / "MAR-INF" / "MANIFEST.json", "{}")
    make_archive(tmp_path / "model" / "one.mar", "")

    told = settings(tmp_path)

    assert (told["load_models"], told["model_store"]) == ("folder,one.mar", str(tmp_path / "model"))


@pytest.mark.parametrize("file", ["code/inference.py", "mnist.py", "model.pth"])
def test_a_script_with_its_weights_is_a_model(tmp_path: Path, file: str) -> None:
    """As the PyTorch toolkit has it, whose variables say how it is served."""
    put(tmp_path / "model" / file)

    told = settings(
        tmp_path,
        SAGEMAKER_TS_BATCH_SIZE="8",
        SAGEMAKER_TS_MAX_BATCH_DELAY="50",
        SAGEMAKER_MODEL_SERVER_WORKERS="2",
        SAGEMAKER_MODEL_SERVER_TIMEOUT="90",
        SAGEMAKER_CONTAINER_LOG_LEVEL="10",
    )

    assert told["load_models"] == f"model={tmp_path / 'model'}"
    assert (told["default_service_handler"], told["decode_input_request"]) == ("sagemaker_script", "false")
    assert told["default_requirements_file"] == "code/requirements.txt"
    assert json.loads(told["models"]) == {"model": {"1.0": {"batchSize": 8, "maxBatchDelay": 50}}}
    assert (told["default_workers_per_model"], told["NUM_WORKERS"]) == ("2", "2")
    assert (told["default_response_timeout"], told["log_level"]) == ("90", "debug")


def test_without_a_model_from_sagemaker_the_images_own_settings_say_what_is_loaded(tmp_path: Path) -> None:
    """A model may have been built into the image."""
    (tmp_path / "model").mkdir()

    assert "load_models" not in settings(tmp_path)
    assert "load_models" not in settings(tmp_path / "gone", SAGEMAKER_BIND_TO_PORT="8080")


def test_a_variable_of_ours_goes_before_what_sagemaker_says(tmp_path: Path) -> None:
    """The operator sets it on the model, and means it."""
    make_archive(put(tmp_path / "model" / "one.mar"), "")

    told = settings(tmp_path, MARSERVE_LOAD_MODELS="other.mar", MARSERVE_STRICT_START="false")

    assert not {"load_models", "strict_start"} & set(told)
    assert told["model_store"] == str(tmp_path / "model")


def test_what_a_script_requires_need_not_be_installed(tmp_path: Path) -> None:
    """Where the image has it already, and no index can be reached."""
    put(tmp_path / "model" / "code" / "inference.py")

    assert "default_requirements_file" not in settings(tmp_path, MARSERVE_DEFAULT_REQUIREMENTS_FILE="")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SAGEMAKER_BIND_TO_PORT", "abc"),
        ("SAGEMAKER_BIND_TO_PORT", "70000"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "11000"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "11000-11001"),
        ("SAGEMAKER_SAFE_PORT_RANGE", "12000-11000"),
        ("SAGEMAKER_MODEL_SERVER_WORKERS", "many"),
        ("SAGEMAKER_MODEL_SERVER_WORKERS", "0"),
        ("SAGEMAKER_TS_BATCH_SIZE", "-1"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named_with_its_value(tmp_path: Path, variable: str, value: str) -> None:
    """And with what would be right."""
    put(tmp_path / "model" / "code" / "inference.py")

    with pytest.raises(BadSettings, match=rf"{variable} is '{value}'; it must be"):
        settings(tmp_path, **{variable: value})


@pytest.mark.parametrize("many", ["true", "false"])
def test_a_scripts_variable_without_a_script_is_refused(tmp_path: Path, many: str) -> None:
    """It would change nothing."""
    make_archive(put(tmp_path / "model" / "one.mar"), "")

    with pytest.raises(BadSettings, match=r"SAGEMAKER_TS_MIN_WORKERS is '2', .* Remove the variable"):
        settings(tmp_path, SAGEMAKER_TS_MIN_WORKERS="2", SAGEMAKER_MULTI_MODEL=many)


def test_a_folder_with_files_and_no_model_is_refused(tmp_path: Path) -> None:
    """What is in it is said, and what should be."""
    put(tmp_path / "model" / "model.safetensors")
    put(tmp_path / "model" / "read.me")

    with pytest.raises(BadSettings, match=r"holds no model, only model\.safetensors, read\.me: put an archive"):
        settings(tmp_path)


def test_a_model_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    """The volume is not what it should be."""
    put(tmp_path / "model")

    with pytest.raises(BadSettings, match=r"folder .*model cannot be read \(Not a directory\)"):
        settings(tmp_path, SAGEMAKER_BIND_TO_PORT="8080")
