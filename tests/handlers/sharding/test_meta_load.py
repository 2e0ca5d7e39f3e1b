"""Tests for eager models that are built without numbers and filled from a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.context import Checkpoint, Context
from marserve_handlers.errors import ModelNotLoadable
from support.checkpoints import as_workers_get_it, save_dcp

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.torch


class Tied(nn.Module):  # type: ignore[misc, name-defined]
    """An output layer that shares its weights, a buffer that is not saved, and numbers that the class computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(10)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)), persistent=False)
        self.total = float(self.mask.sum().item())
        self.steps = [torch.arange(3.0)]

    def forward(self, rows: Any) -> Any:
        """All of it."""
        return self.norm(self.head(self.embed(rows))) * self.total + self.mask.sum() + self.steps[0].sum()


ROWS = torch.tensor([1, 2, 3])


@pytest.fixture(scope="module")
def net() -> Any:
    """As it was trained."""
    torch.manual_seed(3)
    return Tied().eval()


def _save(kind: str, model: Any, folder: Path) -> Path:
    from safetensors.torch import save_model

    if kind == "dcp":
        return save_dcp(folder, model.state_dict())
    folder.mkdir()
    save_model(model, str(folder / "model.safetensors"))
    return folder


def _fill(model_class: Callable[[], Any], folder: Path, *, may_map: bool = False) -> tuple[Any, Any]:
    from marserve_handlers.sharding.meta_load import build_empty, fill_model

    model = build_empty(model_class)
    assert all(parameter.is_meta for parameter in model.parameters())
    return model.eval(), fill_model(model, as_workers_get_it(folder, may_map=may_map))


@pytest.mark.parametrize(("kind", "may_map"), [("dcp", False), ("safetensors", False), ("safetensors", True)])
def test_a_filled_model_answers_as_the_one_that_was_saved(net: Any, tmp_path: Path, kind: str, may_map: bool) -> None:
    """With ties as they were, buffers that are not saved, and numbers that the class computes."""
    model, filled = _fill(Tied, _save(kind, net, tmp_path / "weights"), may_map=may_map)

    assert torch.equal(model(ROWS), net(ROWS))
    assert model.head.weight is model.embed.weight
    assert filled.size == 40 * 4 + 4 * 10 * 4 + 8
    assert filled.mapped == (filled.size if may_map else 0)


def test_a_class_without_numbers_of_its_own_is_built_once(tmp_path: Path) -> None:
    """On the meta device: its numbers are never computed."""
    built = []

    class Plain(nn.Linear):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            built.append(torch.empty(0).device.type)
            super().__init__(3, 2)

    folder = _save("safetensors", Plain(), tmp_path / "weights")
    built.clear()

    _fill(Plain, folder)

    assert built == ["meta"]


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_names_and_shapes_that_do_not_fit_are_named(tmp_path: Path, kind: str) -> None:
    """The first few of each sort, in one sentence."""

    class Other(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)

    folder = _save(kind, nn.ModuleDict({"first": nn.Linear(3, 4), "late": nn.Linear(2, 2)}), tmp_path / "weights")

    with pytest.raises(ModelNotLoadable) as raised:
        _fill(Other, folder)

    assert str(raised.value) == (
        "it does not fit Other: it lacks last.weight, last.bias; it holds late.bias, late.weight, which the model does "
        "not have; first.weight has the shape [4, 3] in it and [2, 3] in the model; first.bias has the shape [4] in it "
        "and [2] in the model."
    )


def test_the_state_of_a_whole_training_is_told_from_a_models(tmp_path: Path) -> None:
    """All names of the model lie below one more."""
    folder = _save("safetensors", nn.ModuleDict({"model": nn.Linear(3, 2)}), tmp_path / "weights")

    with pytest.raises(ModelNotLoadable, match=r"The names in it begin with model.: save the state dict of that part"):
        _fill(lambda: nn.Linear(3, 2), folder)


def test_what_has_no_numbers_in_the_end_is_named(tmp_path: Path) -> None:
    """A tensor that the class computes of its weights, which the checkpoint has."""

    class Derived(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.norms = self.layer.weight.detach().norm(dim=1)
            self.register_buffer("cached", self.layer.bias.detach() * 2, persistent=False)

    folder = _save("safetensors", Derived(), tmp_path / "weights")

    with pytest.raises(ModelNotLoadable, match=r"neither it nor the class gives numbers to cached, norms; register"):
        _fill(Derived, folder)


def test_two_tensors_where_the_model_has_one_are_refused_unless_they_are_equal(net: Any, tmp_path: Path) -> None:
    """One of them would be left out without a word."""
    folder = save_dcp(tmp_path / "weights", net.state_dict())
    model, _ = _fill(Tied, folder)
    state = {**net.state_dict(), "head.weight": net.head.weight + 1}
    shutil.rmtree(folder)
    save_dcp(folder, state)

    with pytest.raises(ModelNotLoadable, match=r"head.weight and embed.weight are one tensor in the model, and two"):
        _fill(Tied, folder)
    assert torch.equal(model(ROWS), net(ROWS))


def test_another_dtype_is_converted_and_said(tmp_path: Path) -> None:
    """The class decides, as it does for weights in the archive; converted ones are not mapped."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "model.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n"
    )
    half = nn.Linear(3, 2).bfloat16()
    from safetensors.torch import save_file

    save_file({"weight": half.weight.detach(), "bias": torch.ones(2)}, tmp_path / "weights" / "model.safetensors")
    context = Context("m", str(tmp_path), {"model": {"modelFile": "model.py"}}, 1, None, "1")
    context.checkpoint = Checkpoint(str(tmp_path / "weights"), may_map=True)
    context.open_model = _open_model

    model = context.load_model()

    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, half.weight.float())
    assert (context.checkpoint.size, context.checkpoint.mapped) == (20, 8)
    assert context.checkpoint.seconds is not None
    assert context.has_taken_checkpoint
    (warning,) = context.load_warnings
    assert warning.startswith("the checkpoint weights has weight in another dtype than the model: converted")


def _open_model(context: Context) -> Any:
    from marserve_handlers.base import BaseHandler

    class Loader(BaseHandler):
        """Loads."""

    loader = Loader()
    loader.initialize(context)
    return loader.model


def test_a_file_that_is_cut_off_meanwhile_is_refused(net: Any, tmp_path: Path) -> None:
    """It was whole when the model was registered."""
    (tmp_path / "model.py").write_text("import torch\nclass Net(torch.nn.Module):\n    pass\n")
    folder = _save("safetensors", nn.Linear(3, 2), tmp_path / "weights")
    os.truncate(folder / "model.safetensors", 40)
    context = Context("m", str(tmp_path), {"model": {"modelFile": "model.py"}}, 1, None, "1")
    context.checkpoint, context.open_model = Checkpoint(str(folder)), _open_model

    with pytest.raises(ModelNotLoadable, match=r"^The checkpoint weights cannot be loaded: JSONDecodeError"):
        context.load_model()


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="counts memory by /proc")
def test_mapped_weights_take_no_memory_of_the_process(tmp_path: Path) -> None:
    """64 MiB of them, read once."""

    class Large(nn.Linear):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(4096, 4096, bias=False)

    folder = _save("safetensors", Large(), tmp_path / "weights")
    before = _anonymous()

    model, filled = _fill(Large, folder, may_map=True)
    total = model.weight.sum()

    assert bool(total == total)
    assert filled.mapped == 64 << 20
    assert _anonymous() - before < 8 << 20


def _anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024


def test_what_a_model_changes_in_mapped_weights_stays_in_the_process(tmp_path: Path) -> None:
    """The file is as it was."""
    folder = _save("safetensors", nn.Linear(3, 2), tmp_path / "weights")
    before = (folder / "model.safetensors").read_bytes()

    model, _ = _fill(lambda: nn.Linear(3, 2), folder, may_map=True)
    with torch.no_grad():
        model.weight.zero_()

    assert (folder / "model.safetensors").read_bytes() == before


def test_the_limit_of_memory_while_a_model_is_loaded_leaves_mapped_weights_out() -> None:
    """The kernel counts private maps that may be written, which these are."""
    from marserve.messages import Checkpoint as Named
    from marserve.messages import Load

    def limit(may_map: bool, most: int, layout: bytes = b"") -> int:
        named = Named("weights", may_map, 1000, layout)
        load = Load("m", "1.0", "/m", "h", None, None, 1, memory_limit_bytes=most, checkpoint=named)
        return load.loading_limit_bytes

    assert limit(True, 500) == 1500
    assert limit(False, 500) == 500
    assert limit(True, 500, b"{}") == 500
    assert limit(True, 0) == 0


def test_names_that_are_not_for_printing_are_shown_escaped(tmp_path: Path) -> None:
    """A name of a checkpoint is anyone's word, and the message stands in logs and on terminals."""
    from safetensors.torch import save_file

    names = ["a\nb", "\x1b[2Jc", "d" * 500]
    (tmp_path / "weights").mkdir()
    save_file({name: torch.ones(2) for name in names}, tmp_path / "weights" / "model.safetensors")

    with pytest.raises(ModelNotLoadable) as refused:
        _fill(Tied, tmp_path / "weights")

    message = str(refused.value)
    assert message.isprintable()
    assert r"it holds '\x1b[2Jc', 'a\nb', dddd" in message
    assert len(message) < 500
