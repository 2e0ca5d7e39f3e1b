"""Handlers written for TorchServe, unchanged: one of each kind, and real handwritten digits."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from support.server import Server
from support.shared import shared

pytestmark = pytest.mark.shared


def archive(path: Path, handler: str, files: dict[str, Path | str], **model: str) -> None:
    """An archive of these files, as `torch-model-archiver` lays one out."""
    manifest = {
        "createdOn": "01/02/2026 03:04:05",
        "runtime": "python",
        "model": {"modelName": path.stem, "modelVersion": "1.0", "handler": handler, **model},
        "archiverVersion": "0.12.0",
    }
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, content in files.items():
            zipped.writestr(name, content.read_bytes() if isinstance(content, Path) else content)


def test_a_module_with_functions_serves_unchanged(tmp_path: Path) -> None:
    """`plain_function.py`: module-level `handle(data, context)`, and another function named in the manifest."""
    handler = shared("contract", "fixtures", "handlers", "plain_function.py")
    store = tmp_path / "store"
    store.mkdir()
    archive(store / "plain.mar", "plain_function.py", {"plain_function.py": handler})
    archive(store / "named.mar", "plain_function.py:serve_it", {"plain_function.py": handler})

    with Server(tmp_path, store=store) as server:
        server.register("plain.mar").raise_for_status()
        server.register("named.mar").raise_for_status()

        assert server.predict("plain", b"x").text == "handle saw 1, initialised 1"
        assert server.predict("named", b"x").text == "serve_it saw 1, initialised 10"


def test_a_class_with_handle_serves_unchanged(tmp_path: Path) -> None:
    """`echo_bytes.py`: one class with `initialize` and `handle`."""
    handler = shared("contract", "fixtures", "handlers", "echo_bytes.py")
    store = tmp_path / "store"
    store.mkdir()
    archive(store / "echo.mar", "echo_bytes.py", {"echo_bytes.py": handler})

    with Server(tmp_path, store=store) as server:
        server.register("echo.mar").raise_for_status()

        assert server.predict("echo", b"\x00\xffbytes").content == b"\x00\xffbytes"


@pytest.mark.torch
def test_a_subclass_of_ts_base_handler_serves_unchanged(tmp_path: Path) -> None:
    """`base_linear.py`: `from ts.torch_handler.base_handler import BaseHandler`, an eager model and a state dict."""
    torch = pytest.importorskip("torch")
    fixtures = shared("contract", "fixtures", "handlers")
    store = tmp_path / "store"
    store.mkdir()
    weights = tmp_path / "linear.pt"
    state = {
        "layer.weight": torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.25]]),
        "layer.bias": torch.tensor([0.5, -0.5]),
    }
    torch.save(state, weights)
    files = {
        "base_linear.py": fixtures / "base_linear.py",
        "linear_model.py": fixtures / "linear_model.py",
        "linear.pt": weights,
    }
    archive(store / "linear.mar", "base_linear.py", files, modelFile="linear_model.py", serializedFile="linear.pt")

    with Server(tmp_path, store=store) as server:
        server.register("linear.mar").raise_for_status()

        answer = server.client.post(f"{server.inference}/predictions/linear", json={"x": [1.0, 2.0, 3.0]})

        assert answer.json() == {"y": [14.5, 0.25]}
        assert server.describe("linear")["workers"][0]["status"] == "READY"


@pytest.mark.torch
def test_ten_handwritten_digits_are_classified_10_of_10(tmp_path: Path) -> None:
    """Real weights and pictures, an eager model under the built-in image classifier."""
    pytest.importorskip("torch")
    pictures = shared("data", "mnist")
    store = tmp_path / "store"
    store.mkdir()
    config = "handler:\n  mode: L\n  size: [28, 28]\n  mean: [0.1307]\n  std: [0.3081]\n  topk: 1\n"
    files = {
        "digits_model.py": shared("contract", "fixtures", "digits_model.py"),
        "mnist_cnn.pt": pictures / "mnist_cnn.pt",
        "model-config.yaml": config,
    }
    archive(
        store / "mnist.mar",
        "image_classifier",
        files,
        modelFile="digits_model.py",
        serializedFile="mnist_cnn.pt",
        configFile="model-config.yaml",
    )

    with Server(tmp_path, store=store) as server:
        server.register("mnist.mar").raise_for_status()

        answers = [server.predict("mnist", (pictures / f"{digit}.png").read_bytes()).json() for digit in range(10)]

    assert [list(answer) for answer in answers] == [[str(digit)] for digit in range(10)]
