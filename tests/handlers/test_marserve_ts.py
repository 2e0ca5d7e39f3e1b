"""The second wheel of this repository: `ts` and `model_archiver` outside workers."""

from __future__ import annotations

import json
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


PACKAGE = """
import json, sys, zipfile
from argparse import Namespace
from pathlib import Path
from model_archiver.model_packaging import package_model
from model_archiver.model_packaging_utils import ModelExportUtils

folder = Path(sys.argv[1])
(folder / "config.py").write_text("model = dict()")
(folder / "weights.pth").write_bytes(b"weights")
(folder / "det_handler.py").write_text("def handle(data, context): return data")
(folder / "out").mkdir()
flags = {
    "model_file": f"{folder}/config.py",
    "config_file": f"{folder}/config.py",
    "serialized_file": f"{folder}/weights.pth",
    "handler": f"{folder}/det_handler.py",
    "model_name": "faster_rcnn",
    "version": "1.0",
    "export_path": f"{folder}/out",
    "force": False,
    "requirements_file": None,
    "extra_files": None,
    "runtime": "python",
    "archive_format": "default",
}
manifest = ModelExportUtils.generate_manifest_json(Namespace(**flags))
package_model(Namespace(**flags), manifest)
with zipfile.ZipFile(folder / "out" / "faster_rcnn.mar") as archive:
    told = json.loads(archive.read("MAR-INF/MANIFEST.json"))
    print(json.dumps([sorted(archive.namelist()), told["model"], told == json.loads(manifest)]))
"""


def test_a_tool_that_converts_models_packages_them(wheel: Path, tmp_path: Path) -> None:
    """As those of OpenMMLab call it: flags in a namespace, a manifest's text, then the archive."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    work = tmp_path / "work"
    work.mkdir()

    run = run_with(tmp_path / "wheel", f"sys.argv = ['', {str(work)!r}]\n{PACKAGE}")

    members = ["MAR-INF/MANIFEST.json", "config.py", "det_handler.py", "weights.pth"]
    model = {
        "modelName": "faster_rcnn",
        "serializedFile": "weights.pth",
        "handler": "det_handler.py",
        "modelFile": "config.py",
        "modelVersion": "1.0",
        "configFile": "config.py",
    }
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == [members, model, True]


PARSE = """
import sys
from unittest import mock
import model_archiver.model_packaging as packaging
from model_archiver.arg_parser import ArgParser
from model_archiver.manifest_components.manifest import Manifest
from model_archiver.manifest_components.model import Model
from model_archiver.model_archiver_error import ModelArchiverError

flags = "--model-name m --handler x/h.py -v 0.1 --export-path /nowhere --serialized-file a/w.pt".split()
parsed = ArgParser.export_model_args_parser().parse_args(flags)
assert (parsed.serialized_file, parsed.export_path, parsed.version) == ("a/w.pt", "/nowhere", "0.1"), parsed
assert str(Model("m", "a/w.pt", "x/h.py")) == '{"modelName": "m", "serializedFile": "w.pt", "handler": "h.py"}'
assert Manifest("python3", Model("m", None, "h")).manifest_dict["runtime"] == "python3"
try:
    packaging.package_model(parsed, "{}")
except ModelArchiverError as error:
    assert "/nowhere is no folder" in str(error), error
else:
    raise AssertionError
with mock.patch("model_archiver.model_packaging.package_model") as called, mock.patch.object(sys, "argv", ["", *flags]):
    packaging.generate_model_archive()
assert called.call_args.args == (parsed,), called.call_args
"""


def test_flags_manifests_and_errors_are_there_for_tools(wheel: Path, tmp_path: Path) -> None:
    """Under the names that they import; a tool's own tests may replace the calls."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)

    run = run_with(tmp_path, PARSE)

    assert run.returncode == 0, run.stderr
    assert "/nowhere is no folder" in run.stderr


def test_it_refuses_to_stand_beside_torchserve(wheel: Path, tmp_path: Path) -> None:
    """The import says which one to uninstall."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "torchserve-0.12.0.dist-info").mkdir()

    run = run_with(tmp_path, "import ts")

    assert run.returncode == 1
    assert "ImportError: torchserve and marserve-ts are both installed here" in run.stderr
