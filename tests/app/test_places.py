"""The folders that a server writes, before anything is begun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from marserve.app.places import WRITTEN, refuse_unusable, why_unwritable
from marserve.errors import BadSettings
from marserve.settings import Settings, load_settings


def load(here: Path, **variables: str) -> Settings:
    """The settings of a folder with a model store, with these variables of ours."""
    (here / "model_store").mkdir(exist_ok=True)
    return load_settings("marserve", {}, {f"MARSERVE_{key.upper()}": value for key, value in variables.items()}, here)


@pytest.mark.parametrize("name", sorted({*WRITTEN} - {"temporary_folder"}))
def test_a_folder_that_is_a_file_or_below_one_is_refused(tmp_path: Path, name: str) -> None:
    """With the key, the value, why, and where it stood; nothing is made meanwhile."""
    (tmp_path / "file").write_text("x")

    for value, why in (("file", "it is a file"), ("file/below/it", f"{tmp_path / 'file'} is a file")):
        settings = load(tmp_path, **{name: value})
        with pytest.raises(BadSettings) as error:
            refuse_unusable(settings)
        assert error.value.message == (
            f"{name} is {value!r}, where the server cannot write ({why}); name a folder that it may write to "
            f"(MARSERVE_{name.upper()})"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "model_store"]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_folder_that_is_there_or_can_be_made_will_do(tmp_path: Path, name: str) -> None:
    """It is made when it is first needed."""
    (tmp_path / "there").mkdir()
    refuse_unusable(load(tmp_path, **{name: "there"}))
    if name != "temporary_folder":
        refuse_unusable(load(tmp_path, **{name: "there/a/b"}))
        assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_elses_is_refused(tmp_path: Path) -> None:
    """The user is named: in a container it is often not the one that was meant."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)

    assert why_unwritable(closed) == (
        f"it may not be written by user {os.geteuid()}, or lies in a file system that is read-only"
    )
    assert str(closed) in str(why_unwritable(closed / "below"))


@pytest.mark.parametrize(("lists", "is_refused"), [({"load_models": "all"}, True), ({}, False)])
def test_a_store_that_is_to_be_listed_and_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: dict[str, str], is_refused: bool
) -> None:
    """Else a server that has no model would say that it is ready; archives that are named need no list."""
    settings = load(tmp_path, **lists)
    closed = tmp_path / "model_store"
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == closed and mode & os.R_OK) and access(path, mode))

    if is_refused:
        with pytest.raises(BadSettings, match=r"model_store is '.*model_store', which may not be read by user \d+; "):
            refuse_unusable(settings)
    else:
        refuse_unusable(settings)


def test_a_control_group_that_is_none_is_refused_and_not_written(tmp_path: Path) -> None:
    """Workers would silently go without their limit."""
    with pytest.raises(BadSettings, match=r"worker_cgroup is 'model_store', which is no cgroup v2 folder"):
        refuse_unusable(load(tmp_path, worker_cgroup="model_store"))

    assert list((tmp_path / "model_store").iterdir()) == []


@pytest.mark.parametrize("name", ["none", "file"])
def test_a_folder_of_shared_memory_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    """It is its clients' to fill: one that is made later would be empty."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadSettings, match=rf"system_shared_memory_folder is '{name}', which is no folder .*/dev/shm"):
        refuse_unusable(load(tmp_path, system_shared_memory_folder=name))

    refuse_unusable(load(tmp_path, system_shared_memory_folder="model_store"))
    assert not (tmp_path / "none").exists()
