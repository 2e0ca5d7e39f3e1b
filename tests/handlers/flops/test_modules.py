"""Counts of torch's modules on `meta`: exact, where the CPU's own operators would count as nothing."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from marserve_handlers.flops.cost import Cost, NotCounted, fit  # noqa: E402
from marserve_handlers.flops.modules import CountedModule  # noqa: E402
from marserve_handlers.optimising.call_arrays import Call  # noqa: E402
from marserve_handlers.runtimes.fixed_sizes import with_fixed_sizes  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`isinstance:FutureWarning"),
]

SIZES = (64, 128, 10)
MLP_ROW = 2 * (64 * 128 + 128 * 10)


def mlp() -> Any:
    """Two layers."""
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).eval()


def cost_of(model: Any, *args: Any, path: str = "") -> Cost:
    """Of a model as it is called."""
    counted = CountedModule(model, path)
    call = Call(args, {})
    return fit(lambda rows: counted.count(call, rows), call.rows)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_layers_count_exactly_two_for_each_weight_and_row(rows: int) -> None:
    """2 m n k, at any size of the batch."""
    assert cost_of(mlp(), torch.rand(rows, 64)) == Cost(0.0, float(MLP_ROW))


def script(folder: Path) -> tuple[Any, str]:
    """The layers as TorchScript, and its file."""
    path = str(folder / "model.pt")
    torch.jit.trace(mlp(), torch.rand(2, 64)).save(path)
    return torch.jit.load(path), path


def exported(folder: Path) -> tuple[Any, str]:
    """The layers as an exported program of any batch size."""
    sizes = {0: torch.export.Dim("n", min=1, max=64)}
    return torch.export.export(mlp(), (torch.rand(2, 64),), dynamic_shapes=(sizes,)).module(), ""


@pytest.mark.parametrize("make", [script, exported])
def test_the_same_layers_count_the_same_however_they_were_saved(
    make: Callable[[Path], tuple[Any, str]], tmp_path: Path
) -> None:
    """TorchScript by its file, since it cannot be copied without its weights."""
    model, path = make(tmp_path)

    assert cost_of(model, torch.rand(2, 64), path=path) == Cost(0.0, float(MLP_ROW))


def eager(folder: Path) -> tuple[Any, str]:
    """The layers as they are."""
    return mlp(), ""


@pytest.mark.parametrize("make", [eager, script, exported])
def test_rows_that_only_fill_a_batch_up_are_not_counted(
    make: Callable[[Path], tuple[Any, str]], tmp_path: Path
) -> None:
    """With `allowedBatchSizes`, whose padding stands before the module; the module goes on padding."""
    model, path = make(tmp_path)
    padded = with_fixed_sizes(model, [1, 4, 16], None)

    assert cost_of(padded, torch.rand(3, 64), path=path) == Cost(0.0, float(MLP_ROW))
    assert padded(torch.rand(3, 64)).shape == (3, 10)


def test_lstm_and_attention_count_which_are_nothing_on_the_cpu() -> None:
    """By their formulas: four gates of two products; projections, scores, values and two layers."""
    lstm = torch.nn.LSTM(16, 32, batch_first=True).eval()
    encoder = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    steps, words = 5, 7

    assert cost_of(lstm, torch.rand(2, steps, 16)) == Cost(0.0, 2.0 * steps * 4 * 32 * (16 + 32))
    assert cost_of(encoder, torch.rand(2, words, 32)) == Cost(
        0.0, 2.0 * words * (4 * 32 * 32 + 2 * 32 * 64) + 2.0 * 2 * words * words * 32
    )


def test_counting_takes_no_memory_for_weights_and_leaves_the_model_alone() -> None:
    """The copy's tensors have no numbers, those that are plain attributes too."""

    class Model(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.offset = torch.ones(8)

        def forward(self, x: Any) -> Any:
            return self.linear(x) + self.offset

    model = Model().eval()
    before = io.BytesIO()
    torch.save(model.state_dict(), before)

    assert cost_of(model, torch.rand(2, 8)) == Cost(0.0, 128.0)
    after = io.BytesIO()
    torch.save(model.state_dict(), after)
    assert before.getvalue() == after.getvalue()
    assert model.offset.device.type == "cpu"


def test_a_model_that_looks_at_numbers_is_not_counted_and_says_where() -> None:
    """There are none on `meta`."""

    class Looks(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(NotCounted, match="does not run on torch's device meta"):
        cost_of(Looks(), torch.rand(2, 8))


def test_script_from_elsewhere_is_not_counted() -> None:
    """Its file is not known."""
    with pytest.raises(NotCounted, match="not loaded from the archive's file"):
        CountedModule(torch.jit.trace(mlp(), torch.rand(2, 64)))


def test_operators_of_others_are_named() -> None:
    """What they take is not known."""
    with torch.library._scoped_library("flops_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        class Calls(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
            def forward(self, x: Any) -> Any:
                return torch.ops.flops_test.twice(x) @ x.T

        counted = CountedModule(Calls())
        assert counted.count(Call((torch.rand(2, 8),), {}), 2) == 2 * 2 * 2 * 8

    assert counted.uncounted == {"flops_test::twice"}


@pytest.mark.parametrize(("dtype", "word"), [("float32", "float32"), ("bfloat16", "bfloat16"), (None, "float32")])
def test_the_peak_is_that_of_the_weights_dtype(dtype: str | None, word: str) -> None:
    """Of a model without weights that of float32."""
    model = torch.nn.ReLU() if dtype is None else mlp().to(getattr(torch, dtype))

    assert CountedModule(model).dtype == word
