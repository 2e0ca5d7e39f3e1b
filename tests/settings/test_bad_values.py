"""Every key of the table with a value that it cannot have, as the command line and the environment give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.settings import KEYS, load_settings
from support.command_line import marserve

# A word that no value of the kind is.
BY_KIND = {
    "address": "nowhere",
    "path of a URL": "no path",
    "true or false": "perhaps",
    "whole number": "many",
    "number": "many",
    "word": "nonsense",
    "bytes, as `500MB` or `2GiB`": "lots",
    "`auto`, or bytes, as `500MB` or `2GiB`": "lots",
    "`auto`, or a number": "some",
    "hosts, comma-separated": "https://models.example.com",
    "regular expression": "(",
    "regular expressions, comma-separated": "(",
    "`path` or `name=path`, comma-separated": "old=",
    "JSON": "{",
    "`off`, `ignore`, `load`, `load-and-default` or `canary`": "sometimes",
}
# What is wrong with a value that could be right: nothing of that name is there, or it asks for what is not.
BY_KEY = {
    **dict.fromkeys(("certificate_file", "private_key_file", "keystore", "desired_state"), "gone"),
    **dict.fromkeys(("model_store", "workflow_store", "temporary_folder"), "gone"),
    **dict.fromkeys(("debug", "cpu_launcher_enable", "ipex_enable", "ipex_gpu_enable"), "true"),
    "service_envelope": "kfserving",
    "token_file": "",
}
# Every text is a value: it is judged where it is used, or never was.
ANY_TEXT = {
    "body_sample_hide": "names that may come",
    "cors_allowed_headers": "goes to browsers as it stands",
    "cors_allowed_methods": "goes to browsers as it stands",
    "cors_allowed_origin": "goes to browsers as it stands",
    "cpp_log_config": "not read",
    "cpu_launcher_args": "not read",
    "default_requirements_file": "looked for in each archive",
    "default_service_handler": "looked for in each archive",
    "download_cache": "judged when the server starts (tests/app/test_places.py)",
    "environment_folder": "judged when the server starts (tests/app/test_places.py)",
    "system_shared_memory_folder": "judged when the server starts (tests/app/test_places.py)",
    "flight_recorder_file": "judged when the server starts (tests/app/building/test_metrics.py)",
    "grpc_inference_address": "judged when it is bound",
    "grpc_management_address": "judged when it is bound",
    "keystore_pass": "judged when the keystore is opened",
    "keystore_type": "judged when the keystore is opened",
    "load_models": "judged when models are loaded",
    "log_location": "judged when logs are opened",
    "metrics_config": "judged when it is read",
    "metrics_location": "judged when logs are opened",
    "model_roots": "may be mounted later; a warning tells",
    "model_server_home": "not read",
    "model_snapshot": "judged when it is restored",
    "plugins_path": "not read",
    "preemption_file": "comes to be there later",
    "python": "not read",
    **dict.fromkeys(("ray_address", "ray_advertise", "ray_cache", "ray_listen"), "judged when a model wants it"),
    "state_folder": "judged when the server starts (tests/app/test_places.py)",
    "system_metrics_cmd": "judged when it is run",
    "trusted_models": "names of archives that may come",
    "ts_header_key_sequence_end": "a header's name",
    "ts_header_key_sequence_id": "a header's name",
    "ts_header_key_sequence_start": "a header's name",
    "vmargs": "not read",
    "worker_cgroup": "judged when the server starts (tests/app/test_places.py)",
}
REFUSED = sorted(set(KEYS) - set(ANY_TEXT))


def bad_value(name: str) -> str:
    """A value that the key cannot have."""
    return BY_KEY[name] if name in BY_KEY else BY_KIND[KEYS[name].kind.name]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model store, and nothing in the environment."""
    (tmp_path / "model_store").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("TEMP", "LOG_LOCATION", "METRICS_LOCATION"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_there_is_a_wrong_value_for_every_key_or_a_reason_why_not() -> None:
    """A new key comes with one of the two."""
    assert not set(ANY_TEXT) - set(KEYS)
    assert not {name for name in REFUSED if name not in BY_KEY and KEYS[name].kind.name not in BY_KIND}


@pytest.mark.parametrize("name", REFUSED)
def test_a_start_with_a_wrong_value_is_status_2_and_says_which(here: Path, name: str) -> None:
    """The key, the value, and nothing begun."""
    value = bad_value(name)
    more = ["--set", "inference_address=https://127.0.0.1:1"] if "_file" in name or name == "keystore" else []

    ran = marserve("start", "--foreground", *more, "--set", f"{name}={value}")

    assert ran.status == 2
    assert name in ran.err or name == "temporary_folder"
    assert value in ran.err
    assert sorted(path.name for path in here.iterdir()) == ["model_store"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_variable_is_named_beside_its_key(here: Path, name: str) -> None:
    """Where the value stands, and what would be right."""
    with pytest.raises(BadSettings) as error:
        load_settings("marserve", {}, {KEYS[name].env: bad_value(name)}, here)

    assert error.value.key
    assert KEYS[name].env in error.value.message or name == "temporary_folder"
