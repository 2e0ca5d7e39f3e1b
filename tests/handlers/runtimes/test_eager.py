"""Eager models: one class, and weights that are data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from marserve_handlers.errors import ModelNotLoadable  # noqa: E402
from marserve_handlers.runtimes.eager import load_eager  # noqa: E402

pytestmark = pytest.mark.torch

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x)
"""


@pytest.fixture(autouse=True)
def _forget_models() -> Iterator[None]:
    """Model files are modules; each test brings its own of the same names."""
    before = set(sys.modules)
    path = list(sys.path)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and "net" in name:
            del sys.modules[name]
    assert sys.path == path


def state(value: float) -> dict[str, Any]:
    """Weights of the network above, all alike."""
    return {"layer.weight": torch.full((1, 2), value), "layer.bias": torch.full((1,), value)}


def answer(model: Any) -> float:
    """What the network says to ones."""
    with torch.inference_mode():
        return float(model(torch.ones(1, 2)))


def test_a_state_dict_is_loaded(tmp_path: Path) -> None:
    """From what torch.save wrote, by any name; the model is ready for evaluation."""
    (tmp_path / "net_a.py").write_text(NET)
    for name in ("w.pt", "w.pth", "w.bin"):
        torch.save(state(2.0), tmp_path / name)
        model = load_eager(str(tmp_path), "net_a.py", str(tmp_path / name), "cpu")

        assert answer(model) == 6.0
        assert not model.training


def test_weights_go_to_the_device_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read onto the host and mapped where they can be: read onto the device they would come back first."""
    read: list[tuple[str, bool]] = []
    load = torch.load

    def note(path: Any, **options: Any) -> Any:
        read.append((str(options["map_location"]), options["mmap"]))
        return load(path, **options)

    monkeypatch.setattr(torch, "load", note)
    (tmp_path / "net_once.py").write_text(NET)
    torch.save(state(2.0), tmp_path / "new.pt")
    torch.save(state(2.0), tmp_path / "old.pt", _use_new_zipfile_serialization=False)

    moved = load_eager(str(tmp_path), "net_once.py", str(tmp_path / "new.pt"), "meta")
    old = load_eager(str(tmp_path), "net_once.py", str(tmp_path / "old.pt"), "cpu")

    assert read == [("cpu", True), ("cpu", False)]
    assert {parameter.device.type for parameter in moved.parameters()} == {"meta"}
    assert answer(old) == 6.0


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_device_without_memory_is_no_fault_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What the runtime raised is what is told."""
    (tmp_path / "net_full.py").write_text(NET)
    (tmp_path / name).write_bytes(b"")

    def load(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr("safetensors.torch.load_model", load)

    with pytest.raises(RuntimeError, match=r"^CUDA error: out of memory$"):
        load_eager(str(tmp_path), "net_full.py", str(tmp_path / name), "cpu")


def test_safetensors_are_loaded_and_preferred(tmp_path: Path) -> None:
    """Named by the manifest, or lying beside a `.pt` of the same name."""
    from safetensors.torch import save_file

    (tmp_path / "net_b.py").write_text(NET)
    save_file(state(3.0), str(tmp_path / "w.safetensors"))
    torch.save(state(2.0), tmp_path / "w.pt")

    assert answer(load_eager(str(tmp_path), "net_b.py", str(tmp_path / "w.safetensors"), "cpu")) == 9.0
    assert answer(load_eager(str(tmp_path), "net_b.py", str(tmp_path / "w.pt"), "cpu")) == 9.0


def test_without_weights_the_class_has_its_own(tmp_path: Path) -> None:
    """A model file alone is enough."""
    (tmp_path / "net_c.py").write_text(NET)

    assert load_eager(str(tmp_path), "net_c.py", None, "cpu")(torch.ones(1, 2)).shape == (1, 1)


def test_a_model_file_may_import_its_neighbours(tmp_path: Path) -> None:
    """The archive's folder is on the path while it is read, and its classes are those of an import."""
    (tmp_path / "net_layers.py").write_text("from torch import nn\nclass Layer(nn.Linear):\n    pass\n")
    (tmp_path / "net_d.py").write_text("from net_layers import Layer\n" + NET.replace("nn.Linear", "Layer"))

    model = load_eager(str(tmp_path), "net_d.py", None, "cpu")

    assert sys.modules["net_d"].Net is type(model)
    assert type(load_eager(str(tmp_path), "net_d.py", None, "cpu")) is type(model)


def test_a_model_file_may_have_a_taken_name(tmp_path: Path) -> None:
    """A file called like a module of the standard library is still the archive's."""
    (tmp_path / "string.py").write_text(NET)

    model = load_eager(str(tmp_path), "string.py", None, "cpu")

    assert type(model).__name__ == "Net"
    assert not hasattr(sys.modules["string"], "Net")
    del sys.modules[type(model).__module__]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (NET + "class Other(nn.Module):\n    pass\n", "Expected only one class as model definition.*Net, Other"),
        ("x = 1\n", "Expected only one class as model definition.*none"),
        ("class Net:\n    pass\n", "no torch.nn.Module"),
    ],
)
def test_other_than_one_model_class_is_refused(tmp_path: Path, source: str, words: str) -> None:
    """The server does not guess."""
    (tmp_path / "net_e.py").write_text(source)

    with pytest.raises(ModelNotLoadable, match=words):
        load_eager(str(tmp_path), "net_e.py", None, "cpu")


def test_a_missing_model_file_is_named(tmp_path: Path) -> None:
    """In TorchServe's words."""
    with pytest.raises(ModelNotLoadable, match=r"Missing the net\.py file"):
        load_eager(str(tmp_path), "net.py", None, "cpu")


def test_a_failing_model_file_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its own exception comes through, and the half module is forgotten."""
    (tmp_path / "net_f.py").write_text("raise ValueError('broken')")

    with pytest.raises(ValueError, match="broken"):
        load_eager(str(tmp_path), "net_f.py", None, "cpu")
    assert "net_f" not in sys.modules


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Missing names, wrong shapes, something else than a state dict."""
    (tmp_path / "net_g.py").write_text(NET)
    for content in (
        {"layer.weight": torch.ones(1, 2)},
        {"layer.weight": torch.ones(5), "layer.bias": torch.ones(1)},
        5,
    ):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(ModelNotLoadable, match=r"w\.pt"):
            load_eager(str(tmp_path), "net_g.py", str(tmp_path / "w.pt"), "cpu")


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_nothing_but_weights_is_unpickled(tmp_path: Path) -> None:
    """A file with code in it is refused, and the code never runs."""
    (tmp_path / "net_h.py").write_text(NET)
    torch.save({"layer.weight": Canary(tmp_path / "hatched")}, tmp_path / "w.pt")

    with pytest.raises(ModelNotLoadable, match="more than weights"):
        load_eager(str(tmp_path), "net_h.py", str(tmp_path / "w.pt"), "cpu")
    assert not (tmp_path / "hatched").exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}"])
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    """Whatever the reader stumbles over."""
    (tmp_path / "net_i.py").write_text(NET)
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ModelNotLoadable, match=name):
        load_eager(str(tmp_path), "net_i.py", str(tmp_path / name), "cpu")


def test_missing_weights_are_named(tmp_path: Path) -> None:
    """The manifest names a file that is not there."""
    (tmp_path / "net_j.py").write_text(NET)

    with pytest.raises(ModelNotLoadable, match=r"gone\.pt is missing"):
        load_eager(str(tmp_path), "net_j.py", str(tmp_path / "gone.pt"), "cpu")
