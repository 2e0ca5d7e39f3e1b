"""Environments of peers: made by venv, and filled by pip from the package index, in a folder of the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class CannotInstall(Exception):
    """An environment cannot be made. `why` says it of a peer, `said` is the end of the installer's words, or empty."""

    def __init__(self, why: str, said: str = "") -> None:
        self.why, self.said = why, said
        super().__init__(self.of("it"))

    def of(self, name: str) -> str:
        """The sentence, said of a peer by its name."""
        return f"{name} {self.why}{_behind(self.said)}"

    def left_out(self, name: str) -> str:
        """The sentence for a peer without which the run goes on."""
        return f"{name} {self.why} and is left out{_behind(self.said)}"


def make_environment(folder: Path, packages: Sequence[str], limit_s: float) -> Path:
    """The interpreter of a new environment with these packages; a step has `limit_s`. Raises CannotInstall."""
    python = folder / "bin" / "python"
    for step in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
    ):
        run_step(step, limit_s)
    return python


def run_step(step: Sequence[str], limit_s: float) -> str:
    """What a step of an installation printed. Raises CannotInstall."""
    try:
        done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"was not installed within {limit_s:g} s") from None
    if done.returncode:
        raise CannotInstall("cannot be installed", done.stderr.strip()[-400:])
    return done.stdout.strip()


def _behind(said: str) -> str:
    return f": {said}" if said else ""
