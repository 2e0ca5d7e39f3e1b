"""Modules that are started by name: those that the repository's files say, and those that users' files hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from marserve.cli.server.pid_file import MARSERVE_WORD
from marserve.plugins import COLLECTORS, ENDPOINTS, PREEMPTION, SNAPSHOTS

ROOT = Path(__file__).parents[1]
SOURCES = {"marserve": "server", "marserve_handlers": "handlers"}
# Names that files of users hold: images, compose files and entry points copied from this repository.
HELD_BY_USERS = {
    "marserve.cli.container",
    "marserve.cli.healthcheck",
    "marserve.cli.torchserve",
    "marserve.rollout.schema",
    "marserve.store.hub_program",
}
FOLDERS = ("server", "docker", "docs", "benchmarks", "examples", "tests/support")
# What a module is given so that it ends by itself, and the status with which it does.
ARGUMENTS: dict[str, tuple[list[str], int]] = {
    "marserve.cli": (["--version"], 0),
    "marserve.cli.container": (["true"], 0),
    "marserve.cli.healthcheck": ([], 1),
    "marserve.cli.manual": ([], 0),
    "marserve.cli.torchserve": (["--version"], 0),
    "marserve.rollout.schema": ([], 0),
    "marserve.settings": (["docs"], 0),
}


def started_names() -> set[str]:
    """Every `-m marserve…` in the files of the repository."""
    texts = [
        path.read_text("utf-8")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix in ("", ".md", ".py", ".sh", ".yaml")
    ]
    return {name for text in texts for name in re.findall(r"-m[\"', ]+(marserve(?:\.[a-z_]+)+)", text)}


@pytest.mark.parametrize("name", sorted(started_names() | HELD_BY_USERS))
def test_a_module_that_is_started_by_name_is_there(name: str, tmp_path: Path) -> None:
    """It is found and is a program; those that end by themselves are started."""
    if name not in ARGUMENTS:
        found = "import sys, importlib.util as u; sys.exit(not (u.find_spec(sys.argv[1] + '.__main__') "
        found += "if u.find_spec(sys.argv[1]).submodule_search_locations else u.find_spec(sys.argv[1])))"
        assert subprocess.run([sys.executable, "-P", "-c", found, name], check=False).returncode == 0
        return
    words, status = ARGUMENTS[name]

    ended = subprocess.run(
        [sys.executable, "-P", "-m", name, *words],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr


def named_modules() -> dict[str, str]:
    """Dotted names of modules that stand as strings in the code, with the file of each: imports do not check them."""
    packages = (ROOT / "server" / "marserve", ROOT / "handlers" / "marserve_handlers")
    return {
        name: str(file.relative_to(ROOT))
        for package in packages
        for file in package.rglob("*.py")
        if file.name != "spans.py"  # names of attributes have the form of names too
        for name in re.findall(
            r"(?<!getLogger\()[\"'](marserve(?:_handlers)?(?:\.[a-z_0-9]+)+)[\"']", file.read_text("utf-8")
        )
    }


def test_a_module_that_a_string_names_is_there() -> None:
    """Moves of files leave strings behind. Groups of plugins and the word of a PID file have the form of names too."""
    no_modules = {COLLECTORS, ENDPOINTS, SNAPSHOTS, PREEMPTION, MARSERVE_WORD}
    named = {name: file for name, file in named_modules().items() if name not in no_modules}
    assert {"marserve_handlers.base", "marserve.worker"} <= set(named)

    lost = {
        name: file
        for name, file in named.items()
        if not (found := (ROOT / SOURCES[name.partition(".")[0]]).joinpath(*name.split("."))).is_dir()
        and not found.with_suffix(".py").is_file()
    }

    assert not lost
