"""What a build holds of weights is what it serves with, and not what its files weigh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from marserve_handlers.optimising.builds import BUILDS, OF_PARENT, find_build
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.optimising.material import Material
from marserve_handlers.optimising.weights import build_bytes, model_bytes

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

WEIGHTS = 4 * (8 * 9 + 8 + 64 * 64 + 64)
"""Bytes in float32 of a convolution and a linear layer."""


def parent() -> Any:
    """Both, and a counter, which is no floating number."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3), torch.nn.AdaptiveAvgPool2d((8, 8)), torch.nn.Flatten(2), torch.nn.Linear(64, 64)
    )
    model.register_buffer("calls", torch.zeros(3, dtype=torch.int64))
    return model.eval()


def built(name: str, folder: Path) -> int:
    """What the build of that name holds, made into the folder and loaded from it."""
    model, build = parent(), find_build(name)
    build.build(Material(model, [Call((torch.randn(1, 1, 12, 12),), {}) for _ in range(2)], 4), folder)
    return build_bytes(name, build.load(lambda: copy.deepcopy(model), folder, 1), folder)


@pytest.mark.parametrize(("name", "held"), [("channels-last", WEIGHTS + 24), ("bf16", WEIGHTS // 2 + 24)])
def test_a_build_without_weights_of_its_own_holds_its_parents(name: str, held: int, tmp_path: Path) -> None:
    """In bfloat16 half of them; whole numbers stay."""
    assert model_bytes(parent()) == WEIGHTS + 24
    assert built(name, tmp_path) == held


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about torch
def test_what_is_compiled_at_the_load_holds_more_than_its_example(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By torch's tracer alone, as the weights are the same."""
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, options: compile_it(model, backend="eager"))
    torch._dynamo.reset()

    assert built("compile", tmp_path) == WEIGHTS + 24


@pytest.mark.onnx
def test_a_build_with_a_file_of_weights_holds_what_is_in_it(tmp_path: Path) -> None:
    """And the same as a session."""
    pytest.importorskip("onnxscript")
    from marserve_handlers.runtimes.onnx import open_session

    held = built("onnx", tmp_path)

    assert held == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert WEIGHTS < model_bytes(open_session(str(tmp_path / "model.onnx"), threads=1)) < held


class Quantised(torch.Tensor):  # type: ignore[misc]
    """A tensor that says that it is as large as before, as those of torchao do."""

    whole: Any
    scale: Any

    @staticmethod
    def __new__(cls, whole: Any, scale: Any) -> Any:
        """Made of whole numbers and scales."""
        tensor = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)
        tensor.whole, tensor.scale = whole, scale
        return tensor

    def __tensor_flatten__(self) -> Any:
        """What it is made of."""
        return ["whole", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As a parameter wants it."""
        return args[0]


def test_quantised_weights_count_as_the_whole_numbers_and_scales_that_they_are() -> None:
    """A byte each, and a scale for each row."""
    layer = torch.nn.Linear(100, 10, bias=False)
    layer.weight = torch.nn.Parameter(
        Quantised(torch.zeros(10, 100, dtype=torch.int8), torch.zeros(10)), requires_grad=False
    )

    assert layer.weight.nbytes == 4000
    assert model_bytes(layer) == 1000 + 40


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of torchao, about itself
def test_linear_layers_of_torchao_hold_a_byte_each_with_a_scale_and_a_zero_for_each_row() -> None:
    """What the build `int8-rows` serves with; compiling it changes nothing of that."""
    library = pytest.importorskip("torchao.quantization")
    model = parent()

    library.quantize_(model, library.Int8DynamicActivationInt8WeightConfig())

    assert model_bytes(model) == WEIGHTS + 24 - 3 * 64 * 64 + 64 * (4 + 1)


def test_each_build_brings_weights_or_holds_its_parents() -> None:
    """A name that is none would count files."""
    assert set(BUILDS) > OF_PARENT
