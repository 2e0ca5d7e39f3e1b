"""`marserve version`."""

from __future__ import annotations

import platform

import pytest

import marserve as package
from marserve.cli.local import version
from support.command_line import marserve


def test_versions_are_told_to_a_person() -> None:
    """Those of marserve and of Python, at least."""
    ran = marserve("version")

    assert ran.status == 0
    assert package.__version__ in ran.out
    assert platform.python_version() in ran.out


def test_versions_are_told_to_a_script() -> None:
    """One object."""
    document = marserve("version", "--json").document

    assert document["marserve"] == package.__version__
    assert set(document) == {"marserve", "python", "torch", "onnxruntime"}


def test_a_runtime_that_is_not_installed_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides which archives can be served."""
    monkeypatch.setattr(version, "RUNTIMES", ("no-such-runtime",))

    assert marserve("version", "--json").document["no-such-runtime"] is None
    assert "not installed" in marserve("version").out
