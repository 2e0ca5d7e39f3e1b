"""The case of docs/faster.md: what it writes and types, on a real server. `MARSERVE_WRITE_PICTURES=1` draws anew."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.commands import addresses, type_in
from support.pages import ROOT, block, blocks
from support.server import free_ports

PAGE = "docs/faster.md"
PROGRAMS = Path(sys.executable).parent
PICTURE = ROOT / "docs" / "pictures" / "faster-builds.svg"
FILES = ("net.py", "train.py", "model-config.yaml")
STEPS = ("start", "optimise", "bench", "rollout", "look")


def test_all_that_the_page_writes_or_types_is_run_and_its_programs_are_python() -> None:
    """No block without a name that the test below knows."""
    assert [one.name for one in blocks(PAGE)] == ["net.py", "train.py", "model-config.yaml", *STEPS]
    for name in ("net.py", "train.py"):
        compile(block(PAGE, name), name, "exec")
    ElementTree.parse(PICTURE)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.onnx
@pytest.mark.timeout(600)
def test_a_model_is_trained_built_anew_and_rolled_out_as_the_page_says(tmp_path: Path) -> None:
    """A build of INT8 wins, is surely faster through the server, takes over, and is what computes in the end."""
    for package in ("torch", "sklearn", "PIL", "safetensors", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    if not (PROGRAMS / "marserve").exists():
        pytest.skip("marserve runs from its sources here: there is no command to type")
    for name in FILES:
        (tmp_path / name).write_text(block(PAGE, name))
    (tmp_path / "tmp").mkdir()
    ports = free_ports(5)
    variables = {**addresses(*ports), "TMPDIR": str(tmp_path / "tmp")}
    said: dict[str, str] = {}
    try:
        for step in STEPS:
            ran = type_in(block(PAGE, step).replace(":8081", f":{ports[1]}"), tmp_path, PROGRAMS, variables)
            assert ran.returncode == 0, f"{step}: {ran.stdout}{ran.stderr}"
            said[step] = ran.stdout
            (tmp_path / f"{step}.out").write_text(ran.stdout)  # what the page quotes
    finally:
        type_in("marserve stop --kill --timeout 5", tmp_path, PROGRAMS, variables)

    right = re.search(r"([\d.]+)% of the digits that it never saw", said["start"])
    assert right is not None
    assert float(right[1]) > 90
    assert re.search(r"^onnx-int8 .* the best$", said["optimise"], re.MULTILINE), said["optimise"]
    assert "Faster: " in said["bench"]
    assert '"computesOn": "onnx-int8"' in said["look"]
    assert '"modelVersion": "1.0-optimised"' in said["look"]
    assert "the best" in (tmp_path / "report.html").read_text()
    if os.environ.get("MARSERVE_WRITE_PICTURES"):
        PICTURE.write_text((tmp_path / "builds.svg").read_text())
