"""Tests for whether a handler can be found at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.registry.intake.handler_check import (
    find_defect,
    folder_of,
    hides_pythons_own,
    module_of,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An unpacked archive with one handler of each kind of file."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "compiled.cpython-311-x86_64-linux-gnu.so").touch()
    (tmp_path / "my-handler.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "handler",
    [
        *("mine", "mine.py", "mine:entry", "mine.py:entry", "/elsewhere/mine.py", "package", "package.inner:f"),
        *("compiled", "my-handler.py", "json", "image_classifier", "base_handler"),
    ],
)
def test_a_handler_that_a_worker_could_import_has_no_defect(folder: Path, handler: str) -> None:
    """From the archive, from what is installed, or built in."""
    assert find_defect(handler, folder, installs_requirements=False) is None


@pytest.mark.parametrize(
    "handler",
    [
        *(
            "no_such_module",
            "gone.py",
            "mine2",
            ":entry",
            ".py",
            "../mine2.py",
            "x" * 3000,
            "a\0b",
            "*",
            "[",
            "..",
            ".",
        ),
        *("no_such_package.module", "é", " ", "__main__2", "\n"),
    ],
)
def test_a_handler_that_is_nowhere_is_a_defect_and_never_an_accident(folder: Path, handler: str) -> None:
    """Odd words do not raise."""
    defect = find_defect(handler, folder, installs_requirements=False)

    assert defect is not None
    assert "handler" in defect


@pytest.mark.parametrize("handler", [None, ""])
def test_no_handler_is_a_defect(folder: Path, handler: str | None) -> None:
    """The sentence says where it could have been named."""
    assert "no handler is named" in str(find_defect(handler, folder, installs_requirements=True))


def test_an_unknown_module_may_come_with_the_model_s_own_packages(folder: Path) -> None:
    """They are installed for the worker only."""
    assert find_defect("no_such_module", folder, installs_requirements=True) is None


def test_once_they_are_installed_the_packages_are_looked_through(folder: Path, tmp_path: Path) -> None:
    """A module there, and nothing else."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "came_along.py").touch()

    assert find_defect("came_along:f", folder, installs_requirements=False, packages=packages) is None
    assert find_defect("stayed_away", folder, installs_requirements=False, packages=packages) is not None


def test_the_folder_of_a_handler_is_looked_through_if_the_archive_has_it(folder: Path) -> None:
    """`path/h.py:f`: its folder comes first on the path, and never one outside."""
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "h.py").touch()
    (folder / "out").symlink_to("/")

    assert folder_of("deep/er/h.py:f", folder) == folder / "deep" / "er"
    assert find_defect("deep/er/h.py:f", folder, installs_requirements=False) is None
    for word in (
        "h.py:f",
        "gone/h.py",
        "/deep/h.py",
        "../h.py",
        "deep/../../h.py",
        "out/h.py",
        "a\0/b",
        "x" * 3000 + "/h",
    ):
        assert folder_of(word, folder) is None


def test_a_module_name_loses_folders_and_its_ending() -> None:
    """As in a worker."""
    assert module_of("a/b/h.py:entry") == "h"


@pytest.mark.parametrize("handler", ["grp.py", "grp", "some/queue.py:f", "types.py:Handler"])
def test_a_handler_called_as_a_module_of_pythons_is_warned_of(handler: str) -> None:
    """A worker may have imported Python's by then."""
    warning = hides_pythons_own(handler)

    assert warning is not None
    assert "has the name of a module that Python itself brings" in warning
    assert f"{module_of(handler)}_handler.py" in warning


@pytest.mark.parametrize("handler", ["mine.py", "image_classifier", None, "", "grp_handler.py:grp"])
def test_other_names_are_fine(handler: str | None) -> None:
    """Built-in handlers, and what only holds such a word."""
    assert hides_pythons_own(handler) is None
