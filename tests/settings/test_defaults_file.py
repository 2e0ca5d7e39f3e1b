"""What an image says where nobody else says anything: the file that MARSERVE_DEFAULTS_FILE names, and variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.errors import BadSettings
from marserve.settings import Entry, load_settings
from marserve.settings.snapshot_files import FolderSnapshots, effective_properties, snapshot_folder, write_properties


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A working directory with a store, and a file of defaults."""
    (tmp_path / "store").mkdir()
    (tmp_path / "defaults").write_text("model_store=store\njob_queue_size=7\ndrain_delay=5\n")
    return tmp_path


ENVIRONMENT = {"MARSERVE_DEFAULTS_FILE": "defaults"}


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_the_file_counts_where_nobody_says_anything(here: Path, entry: Entry) -> None:
    """Also for what TorchServe must be told."""
    settings = load_settings(entry, {}, ENVIRONMENT, here)

    assert settings.job_queue_size == 7
    assert settings.drain_delay == 5
    assert settings.model_store == here / "store"
    assert settings.origins["job_queue_size"][-1].where == "defaults, line 2"
    assert not settings.warnings


@pytest.mark.parametrize("entry", ["torchserve", "marserve"])
def test_everybody_goes_before_it(here: Path, entry: Entry) -> None:
    """The settings' file, a variable, a flag."""
    (here / "config.properties").write_text("job_queue_size=8\n")
    environment = ENVIRONMENT | {"MARSERVE_DRAIN_DELAY": "9"}

    settings = load_settings(entry, {"model_store": "."}, environment, here)

    assert (settings.job_queue_size, settings.drain_delay, settings.model_store) == (8, 9, here)
    assert not settings.warnings


def test_under_torchserve_variables_of_its_keys_go_before_the_defaults_and_behind_the_file(here: Path) -> None:
    """A file that somebody wrote for TorchServe keeps its meaning."""
    environment = ENVIRONMENT | {"MARSERVE_JOB_QUEUE_SIZE": "11"}

    assert load_settings("torchserve", {}, environment, here).job_queue_size == 11
    (here / "config.properties").write_text("job_queue_size=8\n")
    assert load_settings("torchserve", {}, environment, here).job_queue_size == 8
    assert load_settings("marserve", {}, environment, here).job_queue_size == 11
    assert (
        load_settings("torchserve", {"model_store": "."}, {"MARSERVE_JOB_QUEUE_SIZE": "11"}, here).job_queue_size == 8
    )


def test_a_key_that_is_none_stops_the_start(here: Path) -> None:
    """Nobody would see a warning about an image's own file."""
    (here / "defaults").write_text("job_queue_sice=7\n")

    with pytest.raises(BadSettings, match="job_queue_sice is no key that is known; did you mean job_queue_size") as bad:
        load_settings("marserve", {}, ENVIRONMENT, here)
    assert bad.value.source == "defaults, line 1"


def test_a_file_that_is_not_there_stops_the_start(here: Path) -> None:
    """Otherwise a container would be open where its image meant it to be closed."""
    with pytest.raises(BadSettings, match="nowhere cannot be read"):
        load_settings("marserve", {}, {"MARSERVE_DEFAULTS_FILE": "nowhere"}, here)


def test_a_snapshot_holds_what_was_given_and_a_later_image_says_the_rest(here: Path) -> None:
    """Else the defaults of the first image, and its open door, would go on in every later one."""
    (here / "config.properties").write_text("max_request_size=77\n")
    first = ENVIRONMENT | {"MARSERVE_JOB_QUEUE_SIZE": "11", "MARSERVE_DISABLE_TOKEN_AUTHORIZATION": "true"}
    written = effective_properties(load_settings("torchserve", {}, first, here), {"model_store": "store"}, "1")
    FolderSnapshots(snapshot_folder(None, here)).save(
        "20260131120000000-snapshot.cfg", write_properties(written | {"model_snapshot": '{"models": {}}'})
    )
    (here / "defaults").write_text("model_store=.\njob_queue_size=8\ndrain_delay=6\n")

    again = load_settings("torchserve", {}, ENVIRONMENT, here)

    assert again.restored_from is not None
    assert written.keys() == {"version", "tsConfigFile", "max_request_size", "model_store", "marserveFacts"}
    assert (again.max_request_size, again.job_queue_size, again.drain_delay) == (77, 8, 6)
    assert (again.model_store, again.disable_token_authorization) == (here, False)
