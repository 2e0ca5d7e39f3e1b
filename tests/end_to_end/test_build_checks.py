"""A build whose answers are not those that its archive recorded: the parent serves, and the server says so."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from support.server import Server, make_archive

pytestmark = [pytest.mark.torch, pytest.mark.system]

HANDLER = "from ts.torch_handler.base_handler import BaseHandler\n\nclass Handler(BaseHandler):\n    pass\n"
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, rows):
        return self.linear(rows)
"""
ROW = [0.5, -1.0, 2.0, 0.25]


def optimised_archive(path: Path, recorded_off_by: float) -> Any:
    """An eager model with a build in bfloat16, whose recorded outputs are off by so much; its own answer to ROW."""
    torch = pytest.importorskip("torch")
    from marserve_handlers.optimising.builds import find_build
    from marserve_handlers.optimising.call_arrays import Call
    from marserve_handlers.optimising.machine import cpu_flags, versions
    from marserve_handlers.optimising.material import Material
    from marserve_handlers.optimising.sample_calls import write_samples

    names: dict[str, Any] = {}
    exec(NET, names)
    folder, calls = path.with_suffix(".folder"), [Call((torch.randn(1, 4),), {}) for _ in range(3)]
    folder.mkdir()
    build = find_build("bf16")
    build.build(Material(names["Net"]().eval(), calls, 8), folder)
    model = build.load(lambda: names["Net"]().eval(), folder, 1)
    write_samples(folder / "samples.npz", lambda rows: model(rows) + recorded_off_by, calls)
    make_archive(path, HANDLER, name=path.stem)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members["MAR-INF/MANIFEST.json"])
    manifest["model"]["modelFile"] = "net.py"
    proof = {"format": 1, "build": "bf16", "files": {}, "cpu": cpu_flags(), "versions": versions()}
    members |= {
        "MAR-INF/MANIFEST.json": json.dumps(manifest).encode(),
        "MAR-INF/optimised.json": json.dumps(proof).encode(),
        "net.py": NET.encode(),
    }
    members |= {f"optimised/{each.name}": each.read_bytes() for each in folder.iterdir()}
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return names["Net"]().eval()(torch.tensor([ROW]))[0].tolist()


def test_a_build_that_answers_otherwise_than_recorded_is_told_in_describe_log_and_metric(tmp_path: Path) -> None:
    """Beside one that answers as recorded, which serves and is counted nowhere."""
    store = tmp_path / "store"
    store.mkdir()
    whole = optimised_archive(store / "changed.mar", recorded_off_by=0.5)
    optimised_archive(store / "kept.mar", recorded_off_by=0.0)

    with Server(tmp_path, entry="marserve", store=store) as server:
        for name in ("changed", "kept"):
            server.register(f"{name}.mar").raise_for_status()
        described = {name: server.describe(name) for name in ("changed", "kept")}
        answer = server.predict("changed", json.dumps(ROW), **{"Content-Type": "application/json"}).json()
        counted = [
            line
            for line in server.client.get(f"{server.metrics}/metrics").text.splitlines()
            if line.startswith("marserve_build_checks_failed_total{")
        ]
        log = server.output()

    assert answer == pytest.approx(whole, abs=1e-6)
    sentence = "the build bf16 of the archive is not used, the parent serves: output of sample 0 is off by "
    assert [sentence in "\n".join(described[name].get("warnings", [])) for name in ("changed", "kept")] == [True, False]
    assert [described[name]["workers"][0].get("computesOn") for name in ("changed", "kept")] == [None, "bf16"]
    assert sentence in log
    (line,) = counted
    assert 'model="changed"' in line
    assert 'build="bf16"' in line
    assert line.endswith(" 1.0")
