"""Workers in another language: Node.js passes the conformance test, and serves a real model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from marserve.worker.without_server.conformance import Program, check
from support.command_line import marserve
from support.server import Server, poll

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not on this machine"),
]


def model_of(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The example with weights that were fitted to handwritten digits; pictures and digits that were held back."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    pixels, digit = digits.data / 16.0, digits.target
    train = len(pixels) * 3 // 4
    inputs = np.hstack([pixels[:train], np.ones((train, 1))])
    fitted = np.linalg.lstsq(inputs, np.eye(10)[digit[:train]], rcond=1e-6)[0]
    folder.mkdir(exist_ok=True)
    for name in ("worker.mjs", "handler.mjs"):
        shutil.copy(EXAMPLE / name, folder / name)
    (folder / "weights.json").write_text(json.dumps({"weights": fitted[:-1].tolist(), "bias": fitted[-1].tolist()}))
    return pixels[train:], digit[train:]


def archive_of(folder: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive whose workers are Node.js, by the command."""
    monkeypatch.chdir(folder)
    (folder / "model-config.yaml").write_text("workerProgram: [node, worker.mjs]\nbatchSize: 4\n")
    files = ["--handler", "handler.mjs", "--extra-file", "worker.mjs", "--extra-file", "weights.json"]
    ran = marserve("archive", "digits", *files, "--config-file", "model-config.yaml", "-o", store)
    assert ran.status == 0, ran.err


def program_of(folder: Path, *words: str) -> Program:
    """The program with a picture as its body."""
    body = json.dumps({"pixels": [0.5] * 64}).encode()
    return Program(words, folder, body, "application/json")


def test_the_worker_for_nodejs_passes_every_check(tmp_path: Path) -> None:
    """Each check alone."""
    model_of(tmp_path / "model")

    found = check(program_of(tmp_path / "model", "node", str(tmp_path / "model" / "worker.mjs")))

    assert {name: why for name, why in found.items() if why} == {}
    assert len(found) == 8


def test_the_worker_of_marserve_passes_every_check(tmp_path: Path) -> None:
    """By the same program; so what the checks ask for is what the server's own workers do."""
    (tmp_path / "handler.py").write_text(
        "def handle(data, context):\n    return [{'ok': True} for row in data or []]\n"
    )

    found = check(program_of(tmp_path, sys.executable, "-P", "-m", "marserve.worker"))

    assert {name: why for name, why in found.items() if why} == {}


@pytest.mark.parametrize(
    ("right", "wrong", "check_name"),
    [
        ('["results", number,', '["results", number + 1,', "it answers alone and in batches"),
        ("uint64(++finished)", "uint64(0)", "it writes on its page"),
        ('Buffer.from("mW', 'Buffer.from("mX', "it says hello"),
        ("stop: () =>", "never: () =>", "it ends when it is told"),
    ],
)
def test_a_worker_with_a_fault_does_not_pass(
    right: str, wrong: str, check_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the check says what it saw."""
    monkeypatch.setattr("marserve.worker.without_server.conformance.ANSWER_S", 5.0)
    model_of(tmp_path / "model")
    worker = tmp_path / "model" / "worker.mjs"
    text = worker.read_text()
    assert right in text
    worker.write_text(text.replace(right, wrong))

    found = check(program_of(tmp_path / "model", "node", str(worker)))

    assert any(why for name, why in found.items() if name.startswith(check_name))


def test_a_model_in_javascript_is_served_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trusted archives alone; digits as numpy finds them; bad input is the client's; a killed worker comes again."""
    pictures, digits = model_of(tmp_path / "model")
    store = tmp_path / "store"
    store.mkdir()
    archive_of(tmp_path / "model", store, monkeypatch)
    weights = json.loads((tmp_path / "model" / "weights.json").read_text())

    debugged = marserve("debug", store / "digits.mar", tmp_path / "model" / "weights.json", "--trust")
    with Server(tmp_path, entry="marserve", store=store) as server:
        refused = server.register("digits.mar")
    with Server(tmp_path, entry="marserve", store=store, settings={"trusted_models": "digits.mar"}) as server:
        server.register("digits.mar").raise_for_status()
        kind = {"Content-Type": "application/json"}
        answers = [
            server.predict("digits", json.dumps({"pixels": picture.tolist()}), **kind).json()
            for picture in pictures[:60]
        ]
        bad = server.predict("digits", json.dumps({"pixels": [1]}), **kind)
        described = server.describe("digits")
        (pid,) = server.worker_pids("digits")
        os.kill(pid, signal.SIGKILL)
        for _ in poll(30.0, "another worker is there"):
            if server.worker_pids("digits") not in ([], [pid]):
                break
        again = server.predict("digits", json.dumps({"pixels": pictures[0].tolist()}), **kind)

    assert (debugged.status, "and debug runs Python alone." in debugged.err) == (1, True)
    assert refused.status_code == 400
    assert "trusted_models=digits.mar" in refused.text
    wanted = pictures[:60] @ np.array(weights["weights"]) + np.array(weights["bias"])
    np.testing.assert_allclose([answer["scores"] for answer in answers], wanted, rtol=1e-9, atol=1e-9)
    assert sum(answer["digit"] == digit for answer, digit in zip(answers, digits, strict=False)) >= 50
    assert (bad.status_code, "pixels must be a list of 64 numbers" in bad.text) == (400, True)
    assert described["workers"][0]["computesOn"].startswith("Node.js v")
    assert described["workerProgram"] == ["node", "worker.mjs"]
    assert again.json()["digit"] == answers[0]["digit"]


def test_the_command_says_line_by_line_what_holds(tmp_path: Path) -> None:
    """Its status is 1 for a program that is none."""
    (tmp_path / "body.json").write_text("{}")
    words = [sys.executable, "-m", "marserve.worker.without_server.conformance", "--folder", tmp_path]

    ran = subprocess.run(
        [*words, "--body", tmp_path / "body.json", "true"], capture_output=True, text=True, check=False, timeout=120
    )

    assert ran.returncode == 1
    assert "failed  it says hello, and loads: it closed the wire; wanted Hello" in ran.stdout
