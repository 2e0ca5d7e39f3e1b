"""Wheels and source distributions of this repository, built as pip builds them, but without asking an index."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "client"


def build(kind: str, folder: Path, source: Path = ROOT) -> Path:
    """A `wheel` or `sdist` of the project in `source`, written into `folder`, which has no other."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (made,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@contextlib.contextmanager
def installable(folder: Path) -> Iterator[Path]:
    """marserve's wheel. Until the block ends pip and uv find its client's, which it asks for, without an index."""
    wheel, client = build("wheel", folder / "marserve"), build("wheel", folder / "client", CLIENT)
    beside = client.rename(wheel.parent / client.name).parent
    with pytest.MonkeyPatch.context() as patch:
        for name, between in (("PIP_FIND_LINKS", " "), ("UV_FIND_LINKS", ",")):
            patch.setenv(name, str(beside), prepend=between)
        yield wheel


def wheel_members(wheel: Path) -> set[str]:
    """The files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def sdist_members(sdist: Path) -> set[str]:
    """The files in a source distribution, below its one folder."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def unpack_sdist(sdist: Path, folder: Path) -> Path:
    """Unpack a source distribution; the folder that `pip` would build in."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked
