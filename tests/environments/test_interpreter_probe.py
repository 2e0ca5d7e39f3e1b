"""Claims of `marserve.environments.interpreter_probe`: an unfit interpreter is found before a worker starts."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from marserve.environments.interpreter_probe import Probed, judge, probe
from marserve.machine.vendors.tools import ToolOutput
from support.other_python import make_environment, write_program
from support.processes import living, until_blocking


def says(**changes: str) -> ToolOutput:
    """The output of an interpreter that says this of itself, after a line of another module's."""
    said = {"version": "3.10.13", "implementation": "cpython", "prefix": "/opt/t", "executable": "/opt/t/bin/python"}
    said |= {"msgspec": "0.21.0", "why": ""} | changes
    return ToolOutput(f"hello\nmarserve-interpreter {json.dumps(said)}\n")


@pytest.mark.parametrize("version", ["3.10.0", "3.11.9", "3.12.1", "3.13.0"])
def test_workers_run_under_these_versions(version: str) -> None:
    """What stands before the interpreter's own line is not read."""
    found = judge("/p", says(version=version))

    assert isinstance(found, Probed)
    assert (found.version, found.msgspec, found.prefix) == (version, "0.21.0", "/opt/t")


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (says(version="3.9.18"), "its interpreter /p is cpython 3.9.18; workers run under CPython 3.10 to 3.13."),
        (says(version="3.14.0"), "its interpreter /p is cpython 3.14.0; workers run under CPython 3.10 to 3.13."),
        (says(version="2.7.18"), "its interpreter /p is cpython 2.7.18; workers run under CPython 3.10 to 3.13."),
        (
            says(implementation="pypy"),
            "its interpreter /p is pypy 3.10.13; workers run under CPython 3.10 to 3.13.",
        ),
        (
            says(msgspec="", why="ModuleNotFoundError: No module named 'msgspec'"),
            "its interpreter /p cannot import msgspec (ModuleNotFoundError: No module named 'msgspec'), which workers "
            'need. Install it: /p -m pip install "msgspec>=0.21"',
        ),
        (
            says(msgspec="0.20.9"),
            'its interpreter /p has msgspec 0.20.9, which is too old. Install a newer one: /p -m pip install "msgspec>='
            '0.21"',
        ),
        (
            ToolOutput("", 1, "python ended with status 1: no encodings"),
            "its interpreter /p cannot be used: python ended with status 1: no encodings.",
        ),
        (
            ToolOutput("", None, "python did not answer within 30 s"),
            "its interpreter /p cannot be used: python did not answer within 30 s.",
        ),
        (
            ToolOutput("I am a\nshell\n"),
            "its interpreter /p cannot be used: it printed 'I am a shell' where it was to say what it is.",
        ),
        (
            ToolOutput('marserve-interpreter {"version": 3}\n'),
            "its interpreter /p cannot be used: it printed '{\"version\": 3}' where it was to say what it is.",
        ),
    ],
)
def test_an_unfit_one_is_refused_with_what_to_do(output: ToolOutput, sentence: str) -> None:
    """One sentence, with the command where a package is missing."""
    assert judge("/p", output) == sentence


@pytest.mark.parametrize(
    "said",
    [
        {"version": "3.11.7\n2026 ERROR"},
        {"version": "3.11." + "7" * 1000},
        {"version": "three"},
        {"executable": "/opt/\0/python"},
        {"executable": "/" * 5000},
        {"prefix": "/" * 5000},
        {"msgspec": "9" * 5000},
        {"implementation": "c" * 5000},
    ],
)
def test_what_no_interpreter_says_is_refused(said: dict[str, str]) -> None:
    """It would be shown, logged and looked at."""
    sentence = judge("/p", says(**said))

    assert isinstance(sentence, str)
    assert "where it was to say what it is." in sentence
    assert sentence.isprintable()
    assert len(sentence) < 1000


def test_an_environment_says_what_it_is(tmp_path: Path) -> None:
    """It is run by its own path, and not by that of the interpreter that made it."""
    python = make_environment(tmp_path / "e", "msgspec")

    found = probe(str(python))

    assert found == Probed(
        platform.python_version(), "cpython", str(tmp_path / "e"), str(python), msgspec.__version__, ""
    )


def test_packages_of_the_server_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does what variables and the working directory lead to."""
    python = make_environment(tmp_path / "e")
    (tmp_path / "msgspec.py").write_text("__version__ = '9.9'\n")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    found = probe(str(python), environment)

    assert isinstance(found, str)
    assert "cannot import msgspec (ModuleNotFoundError: No module named 'msgspec')" in found


def test_what_is_not_there_or_no_program_is_said(tmp_path: Path) -> None:
    """Nothing is started for it."""
    (tmp_path / "text").write_text("no program")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")

    assert probe(str(tmp_path / "missing")) == f"its interpreter {tmp_path}/missing is not there."
    assert probe(str(tmp_path / "dangling")) == f"its interpreter {tmp_path}/dangling is not there."
    for name in ("text", ""):
        assert "cannot be run: it is no program that this server may execute." in probe(str(tmp_path / name))


def test_one_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """After the limit; no process of it is left."""
    pids = tmp_path / "pids"
    python = write_program(tmp_path / "python", f"sleep 100 & echo $$ $! > {shlex.quote(str(pids))}\nwait")

    found = probe(str(python), limit_s=1.0)

    assert found == f"its interpreter {python} cannot be used: python did not answer within 1 s."
    begun = [int(pid) for pid in pids.read_text().split()]
    until_blocking(lambda: not living(begun), "that all of it has ended")


def test_one_that_prints_without_end_is_ended(tmp_path: Path) -> None:
    """What it prints is not kept."""
    python = write_program(tmp_path / "python", "exec yes")

    assert "printed more than" in str(probe(str(python)))


def test_a_script_that_starts_an_interpreter_is_seen_through(tmp_path: Path) -> None:
    """The interpreter says where it is itself, so that it is watched as well."""
    python = make_environment(tmp_path / "e", "msgspec")
    script = write_program(tmp_path / "shim", f'exec {shlex.quote(str(python))} "$@"')

    found = probe(str(script))

    assert isinstance(found, Probed)
    assert found.executable == str(python)
    assert sys.version.startswith(found.version)
