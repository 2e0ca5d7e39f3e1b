"""mosec is installed once a run, or left out, saying why."""

from __future__ import annotations

import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def said() -> list[str]:
    """What whoever waits was told."""
    return []


@pytest.fixture
def plan(tmp_path: Path, said: list[str]) -> Any:
    """A plan in a folder of its own; it has no load generator."""
    return import_module("plan").Plan(tmp_path, 1, True, None, said.append)


class Commands:
    """Stands in for `subprocess.run`: the step with `fails` in it fails, the last one names a folder of packages."""

    def __init__(self, packages: Path, fails: str = "") -> None:
        self.packages, self.fails = packages, fails
        self.seen: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """One step of an installation."""
        self.seen.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()
        has_failed = bool(self.fails) and self.fails in command
        return subprocess.CompletedProcess(command, int(has_failed), f"{self.packages}\n", "no such package")


def test_where_it_cannot_be_installed_the_run_says_so_and_goes_on(
    plan: Any, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine without a package index still measures all that is not mosec; it is asked once."""
    module = import_module("mosec_peer")
    commands = Commands(tmp_path, fails="pip")
    monkeypatch.setattr(subprocess, "run", commands)

    found = [module.install_mosec(plan) for _ in range(2)]

    assert found == [None, None]
    assert len(commands.seen) == 2
    assert said[-1] == f"{module.NAME} cannot be installed and is left out: no such package"


def test_it_is_installed_once_a_run_and_sees_the_packages_of_the_benchmarks(
    plan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both servers run the same torch, and the second benchmark does not install it again."""
    module = import_module("mosec_peer")
    packages = tmp_path / "packages"
    packages.mkdir()
    commands = Commands(packages)
    monkeypatch.setattr(subprocess, "run", commands)

    found = [module.install_mosec(plan) for _ in range(2)]

    assert found == [tmp_path / "mosec-environment" / "bin" / "python"] * 2
    assert len(commands.seen) == 3
    (shared,) = packages.glob("*.pth")
    assert str(Path(pytest.__file__).parents[1]) in shared.read_text().splitlines()
