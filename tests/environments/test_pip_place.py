"""Tests for where pip is found."""

from __future__ import annotations

import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from marserve.environments import pip_place
from marserve.environments.pip_place import INSTALLED, find_pip, newest_wheel, wheel_folders


def test_an_installed_pip_goes_before_every_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what the operator chose, and newer as a rule."""
    monkeypatch.setattr(pip_place, "find_spec", lambda name: ModuleSpec(name, None))

    assert find_pip() == INSTALLED


def test_without_pip_the_wheel_of_ensurepip_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside ensurepip's own module, or where those who built Python put it (Debian)."""
    own, named = tmp_path / "ensurepip" / "_bundled", tmp_path / "python-wheels"
    for folder, version in ((own, "23.2.1"), (named, "23.10")):
        folder.mkdir(parents=True)
        (folder / f"pip-{version}-py3-none-any.whl").touch()
        (folder / "setuptools-65.5.0-py3-none-any.whl").touch()
    there = ModuleSpec("ensurepip", None, origin=str(tmp_path / "ensurepip" / "__init__.py"))
    monkeypatch.setattr(pip_place, "find_spec", {"ensurepip": there}.get)

    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: None)
    beside = find_pip()
    monkeypatch.setattr(sysconfig, "get_config_var", {"WHEEL_PKG_DIR": str(named)}.get)

    assert beside == str(own / "pip-23.2.1-py3-none-any.whl")
    assert find_pip() == str(named / "pip-23.10-py3-none-any.whl")
    assert wheel_folders() == [named, own]


def test_without_any_there_is_nothing_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller says so."""
    monkeypatch.setattr(pip_place, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: None)

    assert find_pip() is None


def test_of_several_wheels_the_newest_is_taken() -> None:
    """By numbers, not by letters."""
    files = [Path("/a/pip-23.2.1-py3-none-any.whl"), Path("/b/pip-9.0-py3-none-any.whl")]

    assert newest_wheel(files) == "/a/pip-23.2.1-py3-none-any.whl"
    assert newest_wheel([]) is None
