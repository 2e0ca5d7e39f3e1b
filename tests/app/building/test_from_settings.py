"""What the assembly takes from the settings for its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.app.building.from_settings import (
    cors_headers,
    environment_folder,
    http_limits,
    registry_options,
    sagemaker_endpoint,
    sequence_headers,
    takes_uploads,
    worker_environment,
)
from marserve.machine.describe import describe_machine
from marserve.settings import Settings, load_settings
from marserve.settings.table import Entry


def load(here: Path, lines: str, entry: Entry = "marserve") -> Settings:
    """Settings from these lines."""
    (here / "config.properties").write_text(f"model_store=.\n{lines}")
    return load_settings(entry, {}, {}, here)


def test_workers_inherit_none_of_the_servers_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for the commands and a keystore's password are nothing that a handler needs; the rest it gets."""
    hidden = {"MARSERVE_TOKEN", "MARSERVE_KEYSTORE_PASS", "TS_KEYSTORE_PASS", "MARSERVE_STORES", "OF_A_STORE"}
    for name in (*hidden, "MODEL_SETTING"):
        monkeypatch.setenv(name, "value")

    environment = worker_environment(load(tmp_path, 'stores={"hf://": {"token": {"env": "OF_A_STORE"}}}\n'))

    assert environment["MODEL_SETTING"] == "value"
    assert not hidden & environment.keys()


def test_browsers_are_told_what_was_set_and_nothing_else(tmp_path: Path) -> None:
    """An empty value is none."""
    assert cors_headers(load(tmp_path, "")) == ([], [])
    assert cors_headers(load(tmp_path, "cors_allowed_origin=*\ncors_allowed_methods=\n")) == (
        [("Access-Control-Allow-Origin", "*")],
        [],
    )


def test_several_origins_are_a_list_and_a_star_among_them_is_all(tmp_path: Path) -> None:
    """A blank after a comma counts for nothing, and one origin is no list."""
    told = [
        cors_headers(load(tmp_path, f"cors_allowed_origin={value}\n"))
        for value in ("https://a.example, https://b.example", "https://a.example, *", "https://a.example,")
    ]

    assert told[0][1] == ["https://a.example", "https://b.example"]
    assert told[1] == ([("Access-Control-Allow-Origin", "*")], [])
    assert told[2] == ([("Access-Control-Allow-Origin", "https://a.example")], [])


@pytest.mark.parametrize(
    ("entry", "lines", "limit"),
    [
        ("marserve", "", 16 << 30),
        ("marserve", "max_upload_size=2MiB\n", 2 << 20),
        ("marserve", "allow_uploads=false\n", 0),
        ("marserve", "enable_model_api=false\n", 0),
        ("torchserve", "", 0),
        ("torchserve", "enable_model_api=true\n", 0),
        ("torchserve", "enable_model_api=true\nallow_uploads=protected\n", 16 << 30),
    ],
)
def test_archives_may_be_uploaded_where_they_may_be_registered(
    tmp_path: Path, entry: Entry, lines: str, limit: int
) -> None:
    """And under `torchserve` only where a setting says so; never at an address without management."""
    (tmp_path / "config.properties").write_text(f"model_store=.\n{lines}")
    settings = load_settings(entry, {}, {}, tmp_path)

    assert takes_uploads(settings) is (limit > 0)
    assert http_limits(settings, has_management=True).upload_bytes == limit
    assert http_limits(settings).upload_bytes == 0


@pytest.mark.parametrize("variable", ["SAGEMAKER_MULTI_MODE", "SAGEMAKER_MULTI_MODEL"])
@pytest.mark.parametrize(
    ("mode", "is_multi_model"), [(None, False), ("", False), ("false", False), ("true", True), ("1", True)]
)
def test_sagemaker_serves_many_models_where_its_variable_says_so(
    tmp_path: Path, variable: str, mode: str | None, is_multi_model: bool
) -> None:
    """Anything but `false`, under the plug-in's name or SageMaker's own."""
    settings = load(tmp_path, "NUM_WORKERS=0\ndefault_service_handler=service.py:handle\n")

    endpoint = sagemaker_endpoint(settings, {} if mode is None else {variable: mode})

    assert endpoint.is_multi_model == is_multi_model
    assert endpoint.service_file == tmp_path / "service.py"
    assert endpoint.concurrent_transforms == 1


@pytest.mark.parametrize("lines", ["", "default_service_handler=sagemaker_script\n"])
def test_a_shared_handler_that_is_no_file_is_not_looked_for(tmp_path: Path, lines: str) -> None:
    """There is none, or it is installed: nothing can be missing."""
    assert sagemaker_endpoint(load(tmp_path, lines), {"SAGEMAKER_MULTI_MODEL": "true"}).service_file is None


def test_models_of_the_start_get_a_worker_for_each_device_or_one(tmp_path: Path) -> None:
    """Under torchserve one for each core; the setting goes before all. A registration without a number gets none."""
    machine = describe_machine({})._replace(cores=6)

    unset = registry_options(load(tmp_path, ""), machine, 3)
    assert (unset.workers_by_api, unset.workers_at_startup) == (0, 3)
    assert registry_options(load(tmp_path, ""), machine, 0).workers_at_startup == 1
    recorded = registry_options(load(tmp_path, "", "torchserve"), machine, 0)
    assert recorded.workers_at_startup == 6
    told = registry_options(load(tmp_path, "default_workers_per_model=2\n"), machine, 3)
    assert (told.workers_by_api, told.workers_at_startup) == (2, 2)


def test_models_are_described_as_by_torchserve_under_its_entry_alone(tmp_path: Path) -> None:
    """What it never said is in no answer there."""
    machine = describe_machine({})

    described = {
        entry: registry_options(load(tmp_path, "", entry), machine, 0).as_torchserve
        for entry in ("marserve", "torchserve")
    }

    assert described == {"marserve": False, "torchserve": True}


def test_sequences_are_known_by_the_headers_of_the_settings(tmp_path: Path) -> None:
    """The same names for HTTP and gRPC."""
    settings = load(tmp_path, "ts_header_key_sequence_id=x-talk\n")

    assert sequence_headers(settings).id == "x-talk"
    assert registry_options(settings, describe_machine({}), 0).sequence_headers == sequence_headers(settings)


def test_environments_are_kept_where_the_setting_says_else_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is where the desktop's rule has it; a user without a home has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert environment_folder(load(tmp_path, "")) == tmp_path / "cache" / "marserve" / "environments"
    assert environment_folder(load(tmp_path, "environment_folder=kept\n")) == tmp_path / "kept"

    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment_folder(load(tmp_path, "")) == tmp_path / ".cache" / "marserve" / "environments"

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert environment_folder(load(tmp_path, "")) is None
