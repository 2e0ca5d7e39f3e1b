"""Environments that tests make, install marserve's wheel into, and start its server from."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from support.commands import addresses, type_in
from support.distributions import ROOT
from support.server import poll


@contextlib.contextmanager
def environment(python: str, *what: str) -> Iterator[Path]:
    """An environment of its own with these installed; its folder of programs. It is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="marserve-package-") as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        programs = Path(folder) / "bin"
        install(programs, *what)
        yield programs


def install(programs: Path, *what: str) -> None:
    """Install with the environment's own pip."""
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    ran = type_in(f"pip install -q {' '.join([*constraints, *(repr(each) for each in what)])}", programs, programs)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def interpreter(version: str) -> str:
    """An interpreter of this version that runs; skipped where there is none."""
    found = shutil.which(f"python{version}")
    if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
        return found
    pytest.skip(f"there is no python{version} here: it is not tried")


class Serving(NamedTuple):
    """A server that answers: its process, and the file of what it prints."""

    pid: int
    console: Path


@contextlib.contextmanager
def serving(
    programs: Path,
    folder: Path,
    ports: list[int],
    command: str = "marserve start --foreground",
    **more: str,
) -> Iterator[Serving]:
    """A server of this environment in this folder, until the block ends; `more` are variables of its settings."""
    console = folder / f"console-{ports[0]}.log"
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("MARSERVE_", "TS_", "PYTHON"))}
    variables = {**keep, **addresses(*ports), "TMPDIR": str(folder), **more}
    program, *arguments = command.split()
    with console.open("wb") as output:
        process = subprocess.Popen(
            [programs / program, *arguments], cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        for _ in poll(30, "the server answers"):
            assert process.poll() is None, console.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{ports[0]}/livez").status_code == 200:
                    break
        yield Serving(process.pid, console)
    finally:
        process.terminate()
        assert process.wait(60) == 0, console.read_text()


def wait_until_ready(port: int) -> None:
    """Until the models of the start are loaded."""
    for _ in poll(60, "the models are loaded"):
        if httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200:
            return
