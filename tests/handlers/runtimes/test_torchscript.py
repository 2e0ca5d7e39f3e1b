"""TorchScript models."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from marserve_handlers.errors import ModelNotLoadable  # noqa: E402
from marserve_handlers.runtimes.torchscript import load_torchscript  # noqa: E402

pytestmark = pytest.mark.torch


def save_script(path: Path) -> None:
    """A traced layer with weights of one."""
    layer = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.ones_(layer.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(layer, torch.zeros(1, 2)), str(path))


def test_a_script_is_loaded_without_a_word(tmp_path: Path) -> None:
    """Ready for evaluation; torch's advice against TorchScript stays out of the log."""
    save_script(tmp_path / "m.pt")

    model = load_torchscript(str(tmp_path / "m.pt"), torch.device("cpu"))

    with torch.inference_mode():
        assert float(model(torch.ones(1, 2))) == 3.0
    assert not model.training


@pytest.mark.parametrize("kind", ["state dict", "nonsense"])
def test_what_is_no_script_is_refused(tmp_path: Path, kind: str) -> None:
    """With a hint that weights need a model file."""
    path = tmp_path / "m.pt"
    if kind == "state dict":
        torch.save({"a": torch.ones(1)}, path)
    else:
        path.write_bytes(b"nonsense")

    with pytest.raises(ModelNotLoadable, match="modelFile"):
        load_torchscript(str(path), "cpu")


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: out of memory"])
def test_a_device_without_memory_is_no_fault_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """What the runtime raised is what is told."""

    def load(*_: object, **__: object) -> object:
        raise RuntimeError(words)

    monkeypatch.setattr(torch.jit, "load", load)

    with pytest.raises(RuntimeError, match=f"^{words}$"):
        load_torchscript(str(tmp_path / "m.pt"), "cpu")
