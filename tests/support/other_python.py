"""Other interpreters than the tests' own: one that is made in a folder at once, and the real ones of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# Names the real interpreters, in commas.
VARIABLE: Final = "MARSERVE_OTHER_PYTHONS"


def make_environment(folder: Path, *packages: str) -> Path:
    """A virtual environment of the running Python that has these packages alone; the path of its interpreter.

    They are links to those of the tests, so nothing is installed.
    """
    base = Path(os.path.realpath(sys.executable))
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(base)
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site_packages = folder / "lib" / version / "site-packages"
    site_packages.mkdir(parents=True)
    for name in packages:
        spec = find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations
        (site_packages / name).symlink_to(next(iter(spec.submodule_search_locations)))
    return program


def write_program(path: Path, text: str) -> Path:
    """A script of the shell that can be run."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def real_pythons() -> list[str]:
    """The interpreters of other versions on this machine: those of the variable, else those of PATH and pyenv."""
    named = os.environ.get(VARIABLE)
    if named:
        return [path.strip() for path in named.split(",") if path.strip()]
    own = sys.version_info[:2]
    found = []
    for minor in (10, 11, 12, 13):
        places = sorted(Path("~/.pyenv/versions").expanduser().glob(f"3.{minor}.*/bin/python3.{minor}"), reverse=True)
        on_path = shutil.which(f"python3.{minor}")
        candidates = [*map(str, places), *([on_path] if on_path is not None and ".pyenv/shims" not in on_path else [])]
        if candidates and (3, minor) != own:
            found.append(candidates[0])
    return found


def real_environment(python: str, folder: Path) -> Path | None:
    """An environment of a real interpreter with msgspec from the index; None if it cannot be had."""
    if subprocess.run([python, "-m", "venv", str(folder)], capture_output=True).returncode != 0:
        return None
    program = folder / "bin" / "python"
    installed = subprocess.run(
        [program, "-m", "pip", "install", "-q", "--only-binary", ":all:", "msgspec>=0.21"], capture_output=True
    )
    return program if installed.returncode == 0 else None
