"""Settings with flags called as they were typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from marserve.cli.typed_settings import load_as_typed
from marserve.errors import BadSettings
from marserve.settings import sources_report


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without settings of its own."""
    (tmp_path / "model_store").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "set_keys", "named"),
    [
        ({"job_queue_size": "abc"}, ["job_queue_size"], "(--set job_queue_size)"),
        ({"default_workers_per_model": "-3"}, ["default_workers_per_model"], "(--set default_workers_per_model)"),
        ({"default_workers_per_model": "-3"}, [], "(--workers)"),
        ({"inference_address": "nowhere"}, [], "(--inference-address)"),
        ({"no_such_key": "1"}, ["no_such_key"], "(command line)"),
        ({"model_store": "gone"}, [], "(--model-store)"),
    ],
)
def test_a_wrong_value_is_told_with_the_flag_that_there_is(
    flags: dict[str, object], set_keys: list[str], named: str
) -> None:
    """Not with a flag made of the key."""
    with pytest.raises(BadSettings) as refused:
        load_as_typed(flags, set_keys)

    assert refused.value.message.endswith(named)


def test_a_warning_is_told_with_the_flag_that_there_is() -> None:
    """As errors are."""
    settings = load_as_typed({"models": '{"m": {"1.0": {"wormholes": 3}}}'}, ["models"])

    assert [warning.endswith("(--set models)") for warning in settings.warnings] == [True]


def test_the_report_of_sources_names_the_flag_that_there_is() -> None:
    """What was set with `--set` is not said to be set by a flag that there is not."""
    settings = load_as_typed({"job_queue_size": "7", "default_workers_per_model": 2}, ["job_queue_size"])

    told = sources_report(settings)

    assert "job_queue_size=7 is set by --set job_queue_size" in told
    assert "default_workers_per_model=2 is set by --workers" in told


@pytest.mark.parametrize(("typed", "named"), [("--config=gone", "--config"), ("--ts-config=gone", "--ts-config")])
def test_a_missing_file_is_told_as_it_was_typed(typed: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag has two names."""
    monkeypatch.setattr(sys, "argv", ["marserve", "start", typed])

    with pytest.raises(BadSettings, match=rf"no settings file gone \({named}\)"):
        load_as_typed({"ts_config": "gone"})


def test_a_missing_file_of_the_environment_is_told_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag was given."""
    monkeypatch.setenv("MARSERVE_CONFIG_FILE", "gone")

    with pytest.raises(BadSettings, match=r"gone \(variable MARSERVE_CONFIG_FILE\)"):
        load_as_typed({})


@pytest.mark.parametrize(("key", "option"), [("batchSize", "--batch-size"), ("maxWorkers", "--workers")])
def test_a_key_of_a_model_leads_to_its_option(key: str, option: str) -> None:
    """And to the model's file."""
    with pytest.raises(BadSettings, match=f"{key} is a key of a model, for its .*, or {option} of `marserve run`"):
        load_as_typed({key: "4"}, [key])
