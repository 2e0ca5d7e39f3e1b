"""Claims of `marserve.pool.interpreter`: how another interpreter is started, and that a changed one is seen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from marserve.pool.interpreter import (
    Interpreter,
    environment_of,
    find_change,
    link_packages,
    program_of,
    stamp_files,
)
from marserve_handlers.support.distributions import OTHER_INTERPRETER


def test_the_servers_own_interpreter_is_started_without_its_working_directory() -> None:
    """So is one of a virtual environment that we made."""
    assert program_of(None) == [sys.executable, "-P", "-m", "marserve.worker"]
    assert program_of(None, "/e/bin/python") == ["/e/bin/python", "-P", "-m", "marserve.worker"]


def test_another_one_is_started_by_its_path() -> None:
    """By a program that Python 3.10 reads: it has no -P."""
    program = program_of(Interpreter("/opt/bin/python", "3.10.1", "/packages"), "/e/bin/python")

    assert program[:2] == ["/opt/bin/python", "-c"]
    assert len(program) == 3


def test_another_one_gets_our_packages_and_none_of_the_servers_variables_for_python() -> None:
    """All other variables of workers stay."""
    environment = {"PYTHONPATH": "/server/site-packages", "PYTHONHOME": "/usr", "VIRTUAL_ENV": "/venv", "A": "b"}
    other = Interpreter("/opt/bin/python", "3.10.1", "/packages")

    assert environment_of(None, environment) == environment
    assert environment_of(other, environment) == {
        "PYTHONPATH": "/packages",
        "PYTHONNOUSERSITE": "1",
        OTHER_INTERPRETER: "/opt/bin/python",
        "A": "b",
    }


def test_our_packages_are_linked_once(tmp_path: Path) -> None:
    """Two loads may do it at the same time."""
    for _ in range(2):
        folder = link_packages(tmp_path / "a" / "b")

    assert {path.name for path in folder.iterdir()} == {"marserve", "marserve_handlers"}
    assert all((path / "__init__.py").is_file() for path in folder.iterdir())


@pytest.fixture
def environment(tmp_path: Path) -> Interpreter:
    """An environment whose interpreter is a link."""
    base = tmp_path / "base"
    base.write_text("one")
    (tmp_path / "python").symlink_to(base)
    (tmp_path / "pyvenv.cfg").write_text("home = x\n")
    files = [str(tmp_path / "python"), str(tmp_path / "pyvenv.cfg"), str(tmp_path / "absent.cfg")]
    return Interpreter(files[0], "3.10.13", "/packages", "old", stamp_files(files))


def test_an_interpreter_that_stays_has_not_changed(environment: Interpreter) -> None:
    """Also where a file was missing from the first."""
    assert find_change(environment) == ""


def replace_base(folder: Path) -> None:
    """A package manager puts a new file in its place, of the same size."""
    (folder / "new").write_text("two")
    os.replace(folder / "new", folder / "base")


def restore_base(folder: Path) -> None:
    """The same, by a tool that keeps the file's time."""
    before = (folder / "base").stat().st_mtime_ns
    replace_base(folder)
    os.utime(folder / "base", ns=(before, before))


def link_again(folder: Path) -> None:
    """The environment is made again by the same interpreter: its link is another one."""
    (folder / "other").symlink_to(folder / "base")
    os.replace(folder / "other", folder / "python")


def touch_base(folder: Path) -> None:
    """Its bytes are written anew."""
    os.utime(folder / "base", ns=(1, 1))


def link_elsewhere(folder: Path) -> None:
    """The environment is made again, by another interpreter."""
    (folder / "python").unlink()
    (folder / "python").symlink_to(folder / "pyvenv.cfg")


def make_again(folder: Path) -> None:
    """The environment is made again, by the same interpreter."""
    (folder / "pyvenv.cfg").write_text("home = x\nversion = y\n")


def add_config(folder: Path) -> None:
    """A file that was missing is there."""
    (folder / "absent.cfg").write_text("")


@pytest.mark.parametrize(
    ("change", "file", "what"),
    [
        (replace_base, "python", "was replaced"),
        (restore_base, "python", "was replaced"),
        (link_again, "python", "was replaced"),
        (touch_base, "python", "was replaced"),
        (link_elsewhere, "python", "was replaced"),
        (make_again, "pyvenv.cfg", "was replaced"),
        (add_config, "absent.cfg", "was replaced"),
        (lambda folder: (folder / "base").unlink(), "python", "is gone"),
    ],
)
def test_a_changed_one_is_seen(environment: Interpreter, tmp_path: Path, change: object, file: str, what: str) -> None:
    """The sentence names the interpreter, the file, and the next step."""
    change(tmp_path)  # type: ignore[operator]

    assert find_change(environment) == (
        f"the interpreter of its workers, Python 3.10.13 ({tmp_path}/python), has changed since the version was "
        f"loaded: {tmp_path}/{file} {what}. Load the version anew to use the interpreter as it is now."
    )
