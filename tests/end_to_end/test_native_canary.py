"""Archives with native code that nobody trusts, through every command and a server: none of it is run."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from support.command_line import marserve
from support.native_canary import canary_package
from support.server import Server, make_archive

pytestmark = pytest.mark.torch

HANDLER = "from ts.torch_handler.base_handler import BaseHandler\n\nclass Handler(BaseHandler):\n    pass\n"
NET = b"""
import torch

class Net(torch.nn.Module):
    def forward(self, rows):
        return rows * 2
"""


def with_model(path: Path, **model: str) -> None:
    """Say in an archive's manifest what its model is."""
    manifest = path / "MAR-INF" / "MANIFEST.json"
    document = json.loads(manifest.read_text())
    document["model"] |= model
    manifest.write_text(json.dumps(document))


def unpacked(folder: Path, name: str) -> Path:
    """An archive as a folder, with nothing but its handler."""
    folder.mkdir()
    make_archive(folder / "made.mar", HANDLER, name=name)
    with zipfile.ZipFile(folder / "made.mar") as file:
        file.extractall(folder)
    (folder / "made.mar").unlink()
    return folder


def packed(folder: Path, archive: Path) -> Path:
    """The folder as an archive."""
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                file.write(path, path.relative_to(folder).as_posix())
    return archive


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """What is there once native code has run."""
    return tmp_path / "canary"


@pytest.fixture
def as_model(tmp_path: Path, canary: Path) -> Path:
    """An archive whose model is a package."""
    pytest.importorskip("torch")
    folder = unpacked(tmp_path / "as_model", "native")
    canary_package(folder / "model.pt2", canary)
    with_model(folder, serializedFile="model.pt2")
    return packed(folder, tmp_path / "native.mar")


@pytest.fixture
def as_build(tmp_path: Path, canary: Path) -> Path:
    """An archive with a package as its build, which says of this machine what such archives say."""
    pytest.importorskip("torch")
    from marserve_handlers.optimising.machine import cpu_flags, versions

    folder = unpacked(tmp_path / "as_build", "faster")
    (folder / "net.py").write_bytes(NET)
    (folder / "optimised").mkdir()
    canary_package(folder / "optimised" / "model.pt2", canary)
    facts = {"torch": versions()["torch"], "cpu": cpu_flags(), "least_rows": 1, "most_rows": 8}
    (folder / "optimised" / "model.pt2.json").write_text(json.dumps(facts))
    proof = {"format": 1, "build": "aot", "files": {}, "cpu": cpu_flags(), "versions": versions()}
    (folder / "MAR-INF" / "optimised.json").write_text(json.dumps(proof))
    with_model(folder, modelFile="net.py")
    return packed(folder, tmp_path / "faster.mar")


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Two requests."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    for at in range(2):
        (folder / f"{at}.json").write_text(json.dumps([at, 1.0]))
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        "compare {model} {model} --inputs {inputs} --pairs 0",
        "optimise {model} --inputs {inputs} -o {out}",
        "export {model} --to pt2 --inputs {inputs} -o {out}",
        "export {model} --to aoti --inputs {inputs} -o {out}",
        "debug {model} {inputs}/0.json",
    ],
)
def test_no_command_runs_a_model(command: str, as_model: Path, inputs: Path, canary: Path, tmp_path: Path) -> None:
    """Those that load it are refused."""
    ran = marserve(*command.format(model=as_model, inputs=inputs, out=tmp_path).split())

    assert ran.status == 1, ran.out + ran.err
    assert "native code" in ran.out + ran.err, ran.out + ran.err
    assert not canary.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    ["compare {build} {build} --inputs {inputs} --pairs 0", "debug {build} {inputs}/0.json"],
)
def test_no_command_runs_a_build(command: str, as_build: Path, inputs: Path, canary: Path) -> None:
    """They have its parent."""
    ran = marserve(*command.format(build=as_build, inputs=inputs).split())

    assert ran.status == 0, ran.out + ran.err
    assert not canary.exists()


@pytest.mark.long
def test_trust_is_what_would_run_it(as_model: Path, inputs: Path, canary: Path) -> None:
    """Without this the others say nothing."""
    marserve("debug", as_model, inputs / "0.json", "--trust")

    assert canary.exists()


@pytest.mark.system
def test_no_server_runs_it(as_model: Path, as_build: Path, canary: Path, tmp_path: Path) -> None:
    """The load of the model is refused; the build's parent serves, and describe says what to do."""
    with Server(tmp_path, entry="marserve", store=tmp_path) as server:
        refused = server.register(as_model.name, batch_size=1)
        registered = server.register(as_build.name)
        answer = server.predict("faster", "[1, 2]", **{"content-type": "application/json"})
        (described,) = server.client.get(f"{server.management}/models/faster").json()
        metrics = server.client.get(f"{server.metrics}/metrics").text

    assert refused.status_code == 500
    assert "native code" in refused.json()["reason"]
    assert registered.status_code == 200, registered.text
    assert answer.json() == [2, 4]
    assert any("trusted_models" in each for each in described["warnings"]), described
    assert described.get("computesOn") != "aot"
    assert 'on="aot"' not in metrics
    assert not canary.exists()
