"""OpenVINO and NNCF report nothing to their maker where a handler, a build or a worker imports them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from marserve_handlers.optimising.builds import openvino_float, openvino_int8
from marserve_handlers.optimising.telemetry_off import REPORTER

# As both packages do: without the one that reports they go on.
LIBRARY = f"""
try:
    import {REPORTER}
    reports = True
except ImportError:
    reports = False
"""
# Every look for an address goes into a file, and finds none.
NO_NETWORK = """
import os, socket

def refuse(host, *rest, **named):
    with open(os.environ["MARSERVE_TEST_ASKED"], "a") as file:
        print(host, file=file)
    raise OSError("no network in this test")

socket.getaddrinfo = refuse
"""
QUANTISE = """
import copy, sys
from pathlib import Path

import torch

from marserve_handlers.optimising.builds import find_build
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.optimising.material import Material

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
folder = Path(sys.argv[1])
build = find_build("openvino-int8")
build.build(Material(copy.deepcopy(model), [Call((torch.randn(1, 4),), {}) for _ in range(16)], 4), folder)
print(build.load(lambda: model, folder, 1)(torch.ones(1, 4)).shape)
"""


@pytest.mark.parametrize(
    ("name", "load"), [("openvino", openvino_float.import_openvino), ("nncf", openvino_int8.import_nncf)]
)
def test_a_library_is_imported_without_the_package_that_reports(
    name: str, load: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Even where that package is installed, or imported already by a handler."""
    (tmp_path / f"{name}.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, REPORTER, ModuleType(REPORTER))
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, name)

    assert load().reports is False


@pytest.mark.torch
def test_torch_compiles_with_openvino_without_the_package_that_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend `openvino` of `pt2` imports it in a worker. Others change nothing."""
    pytest.importorskip("torch")
    from marserve_handlers.runtimes import tensors

    monkeypatch.setitem(sys.modules, REPORTER, ModuleType(REPORTER))
    seen: dict[str, bool] = {}

    def compile_nothing(model: Any, backend: str) -> Any:
        seen[backend] = sys.modules[REPORTER] is not None
        return model

    monkeypatch.setattr(tensors.torch, "compile", compile_nothing)
    for backend in ("eager", "openvino"):
        tensors.compile_model(lambda data: data, {"backend": backend}, "cpu", None)

    assert seen == {"eager": True, "openvino": False}


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("way", ["as it is", "by a build"])
def test_a_build_asks_for_no_address_and_writes_nothing_into_the_home(way: str, tmp_path: Path) -> None:
    """Outside pytest, which NNCF knows. OpenVINO as it is asks for one, so that this would be seen."""
    for package in ("torch", "openvino", "nncf", "onnxscript", REPORTER):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    home, site, folder = tmp_path / "home", tmp_path / "site", tmp_path / "build"
    for made in (home, site, folder):
        made.mkdir()
    (site / "sitecustomize.py").write_text(NO_NETWORK)
    asked = tmp_path / "asked"
    asked.touch()
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "TF_BUILD", "JENKINS_URL")}
    roots = [str(Path(__file__).parents[3] / room) for room in ("server", "handlers")]
    environment |= {
        "HOME": str(home),
        "MARSERVE_TEST_ASKED": str(asked),
        "PYTHONPATH": os.pathsep.join([str(site), *roots, os.environ.get("PYTHONPATH", "")]),
    }
    program = QUANTISE if way == "by a build" else "import openvino, time; time.sleep(1)"

    ran = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    written = sorted(path.name for path in (home / "intel").glob("*"))
    if way == "by a build":
        assert "torch.Size([1, 4])" in ran.stdout
        assert asked.read_text() == ""
        assert written == []
    else:
        assert "google-analytics" in asked.read_text()
        assert "openvino_ga_cid" in written
