"""The second wheel of this repository: `ts` and `model_archiver` outside workers."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from marserve import __version__

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "handlers" / "marserve_handlers" / "ts_compat"

pytest.importorskip("hatchling", reason="the wheel is built by hatchling")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline."""
    folder = tmp_path_factory.mktemp("wheel")
    script = (
        "import os, sys; os.chdir(sys.argv[1])\n"
        "from hatchling.build import build_wheel; print(build_wheel(sys.argv[2]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(PROJECT), str(folder)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return folder / run.stdout.split()[-1]


def run_with(folder: Path, statement: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the wheel's packages in `folder`, and ours in the checkout."""
    paths = [str(folder), str(ROOT / "handlers"), str(ROOT / "server")]
    script = f"import sys; sys.path[:0] = {paths!r}\n{statement}"
    return subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)


def test_the_wheel_holds_both_packages(wheel: Path) -> None:
    """And nothing else; its version is marserve's."""
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}

    assert tops == {"ts", "model_archiver", f"marserve_ts-{__version__}.dist-info"}


def test_an_authors_unit_tests_find_their_names(wheel: Path, tmp_path: Path) -> None:
    """Handlers, contexts, the launcher, and the archiver."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)

    run = run_with(
        tmp_path,
        "from ts.torch_handler.base_handler import BaseHandler\n"
        "from ts.context import Context\n"
        "from ts.launcher import start, stop\n"
        "from model_archiver import ModelArchiver, ModelArchiverConfig\n"
        "from model_archiver.model_archiver_error import ModelArchiverError\n"
        "from model_archiver.manifest_components.manifest import RuntimeType\n"
        "import ts, model_archiver; print(ts.__file__, model_archiver.__version__)",
    )

    assert run.stdout.split() == [str(tmp_path / "ts" / "__init__.py"), __version__], run.stderr


def test_it_refuses_to_stand_beside_torchserve(wheel: Path, tmp_path: Path) -> None:
    """The import says which one to uninstall."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "torchserve-0.12.0.dist-info").mkdir()

    run = run_with(tmp_path, "import ts")

    assert run.returncode == 1
    assert "ImportError: torchserve and marserve-ts are both installed here" in run.stderr
