"""Each build gives what its parent gives, at batch sizes beside the one it was made with."""

from __future__ import annotations

import copy
import math
import re
import shutil
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from marserve_handlers.optimising import builds
from marserve_handlers.optimising.builds import BUILDS, CannotBuild, find_build
from marserve_handlers.optimising.call_arrays import Call, as_numpy, join, leaves_of
from marserve_handlers.optimising.capture import run_model
from marserve_handlers.optimising.material import Material

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EXACT, ROUNDED = 1e-5, 0.05


class Pictures(torch.nn.Module):  # type: ignore[misc]
    """A convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv2d(1, 8, 3, padding=1)
        self.out = torch.nn.Linear(8, 5)

    def forward(self, pixels: Any) -> Any:
        """The scores."""
        return self.out(torch.relu(self.conv(pixels)).mean((2, 3)))


class Words(torch.nn.Module):  # type: ignore[misc]
    """Attention over sentences of any length; two outputs, and a mask by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(50, 16)
        self.encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.out = torch.nn.Linear(16, 3)

    def forward(self, ids: Any, mask: Any = None) -> Any:
        """The scores, and what they come from."""
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=mask)
        return {"scores": self.out(hidden.mean(1)), "hidden": (hidden,)}


class Branches(torch.nn.Module):  # type: ignore[misc]
    """Other arithmetic for larger batches: what a straight export bakes without a word."""

    def forward(self, rows: Any) -> Any:
        """Twice, or three times."""
        return rows * 3 if rows.shape[0] > 4 else rows * 2


def pictures() -> list[Call]:
    """Sixteen pictures."""
    torch.manual_seed(5)
    return [Call((torch.randn(1, 1, 8, 8),), {}) for _ in range(16)]


def words() -> list[Call]:
    """Sentences of five to seven words."""
    torch.manual_seed(6)
    lengths = [5 + at % 3 for at in range(9)]
    return [Call((torch.randint(0, 50, (1, n)),), {"mask": torch.zeros(1, n, dtype=torch.bool)}) for n in lengths]


def need_compiler() -> None:
    """Skips where there is none."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")


def traced(model: Any, example: Any) -> Any:
    """As TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, example)


def made(name: str, make: Callable[[], Any], calls: list[Call], folder: Path) -> Any:
    """The build of that name, loaded from its files."""
    build = find_build(name)
    build.build(Material(make(), calls, 8), folder)
    return build.load(make, folder, 1)


def largest_error(model: Any, parent: Any, calls: list[Call]) -> float:
    """Over single calls and a batch of seven, as a share of the largest output."""
    worst = 0.0
    for call in [calls[0], calls[1], join([calls[0]] * 7)]:
        wanted, seen = leaves_of(run_model(parent, call)), leaves_of(run_model(model, call))
        assert list(seen) == list(wanted)
        for name, leaf in wanted.items():
            ours, theirs = as_numpy(seen[name]), as_numpy(leaf)
            assert ours.shape == theirs.shape
            assert ours.dtype == theirs.dtype
            worst = max(worst, float(abs(ours - theirs).max() / abs(theirs).max()))
    return worst


@pytest.mark.onnx
@pytest.mark.parametrize("kind", ["module", "torchscript"])
@pytest.mark.parametrize(
    ("name", "bound"), [("channels-last", EXACT), ("bf16", ROUNDED), ("onnx", EXACT), ("onnx-int8", ROUNDED)]
)
def test_a_build_of_pictures_gives_what_its_parent_gives(name: str, bound: float, kind: str, tmp_path: Path) -> None:
    """At any batch size, of a module and of TorchScript."""
    if name.startswith("onnx"):
        pytest.importorskip("onnxscript")
    parent = Pictures().eval()

    def make() -> Any:
        own = copy.deepcopy(parent)
        return own if kind == "module" else traced(own, torch.zeros(2, 1, 8, 8))

    model = made(name, make, pictures(), tmp_path)

    assert largest_error(model, parent, pictures()) <= bound


@pytest.mark.system
@pytest.mark.onnx
@pytest.mark.parametrize("name", ["onnx", "bf16"])
def test_a_build_of_sentences_takes_any_length_and_gives_nested_outputs(name: str, tmp_path: Path) -> None:
    """Arguments by name as the parent takes them."""
    pytest.importorskip("onnxscript")
    parent = Words().eval()

    model = made(name, lambda: copy.deepcopy(parent), words(), tmp_path)

    assert largest_error(model, parent, words()) <= (EXACT if name == "onnx" else ROUNDED)
    assert type(run_model(model, words()[0])["hidden"]) is tuple


@pytest.mark.system
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about torch
@pytest.mark.parametrize(("name", "bound"), [("compile", EXACT), ("aot", EXACT)])
@pytest.mark.parametrize("model", [Pictures, Words])
def test_a_compiled_build_takes_any_batch_and_gives_nested_outputs(
    name: str, bound: float, model: Any, tmp_path: Path
) -> None:
    """Larger ones than it was compiled for in pieces."""
    need_compiler()
    parent, calls = model().eval(), pictures() if model is Pictures else words()

    built = made(name, lambda: copy.deepcopy(parent), calls, tmp_path)

    assert largest_error(built, parent, calls) <= bound
    whole = join([calls[0]] * 19)
    wanted, seen = leaves_of(run_model(parent, whole)), leaves_of(run_model(built, whole))
    assert all(torch.allclose(seen[at], wanted[at], atol=1e-4) for at in wanted)


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about torch
def test_a_compiled_build_compiles_nothing_once_it_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever batch comes, from one row to the largest. By torch's tracer alone, which decides what is compiled."""
    compile_it = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, options: compile_it(model, backend="eager"))
    torch._dynamo.reset()
    parent = Pictures().eval()

    model = made("compile", lambda: copy.deepcopy(parent), pictures(), tmp_path)

    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for rows in range(1, 9):
            assert model(torch.randn(rows, 1, 8, 8)).shape == (rows, 5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize("name", ["aot-int8", "int8-rows"])
def test_a_build_of_torchao_is_within_what_rounding_costs(name: str, tmp_path: Path) -> None:
    """By its own package alone, once it is made."""
    pytest.importorskip("torchao")
    need_compiler()
    parent = Pictures().eval()

    built = made(name, lambda: copy.deepcopy(parent), pictures(), tmp_path)

    assert 0 < largest_error(built, parent, pictures()) <= ROUNDED


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # as above
@pytest.mark.parametrize(
    ("make", "calls", "bound", "linears"), [(Pictures, pictures, ROUNDED, 1), (Words, words, 0.2, 5)]
)
def test_an_int8_package_multiplies_whole_numbers_in_all_its_linear_layers(
    make: Any, calls: Any, bound: float, linears: int, tmp_path: Path
) -> None:
    """Attention's, too: one whose weights were float32 was right, and no faster than its parent."""
    pytest.importorskip("torchao")
    need_compiler()
    parent = make().eval()

    built = made("aot-int8", lambda: copy.deepcopy(parent), calls(), tmp_path)

    with zipfile.ZipFile(tmp_path / "model.pt2") as package:
        (code,) = [package.read(name).decode() for name in package.namelist() if name.endswith("wrapper.cpp")]
    # Each stands once where it is called; only `cpu__qlinear_pointwise_tensor(` and its kind with a sum are calls.
    assert len(re.findall(r"aoti_torch_cpu__qlinear_pointwise\w*\(", code)) == linears
    assert 0 < largest_error(built, parent, calls()) <= bound


@pytest.mark.long
@pytest.mark.onnx
@pytest.mark.filterwarnings("ignore")  # of OpenVINO and NNCF, about themselves
@pytest.mark.parametrize(
    ("name", "bound", "kind"),
    [
        ("openvino", EXACT, "pictures"),
        ("openvino", EXACT, "torchscript"),
        ("openvino", EXACT, "sentences"),
        ("openvino-int8", ROUNDED, "pictures"),
        ("openvino-int8", ROUNDED, "torchscript"),
        ("openvino-int8", 0.2, "sentences"),  # means that almost cancel out; smoothed it is 0.26
    ],
)
def test_a_build_of_openvino_gives_what_its_parent_gives(name: str, bound: float, kind: str, tmp_path: Path) -> None:
    """Its default precision, bfloat16 on some processors, would not; whatever threads a worker has."""
    for package in ("onnxscript", "openvino", *(["nncf"] if name == "openvino-int8" else [])):
        pytest.importorskip(package)
    calls = words() if kind == "sentences" else pictures()
    parent = (Words() if kind == "sentences" else Pictures()).eval()

    def make() -> Any:
        own = copy.deepcopy(parent)
        return traced(own, torch.zeros(2, 1, 8, 8)) if kind == "torchscript" else own

    model = made(name, make, calls, tmp_path)

    assert largest_error(model, parent, calls) <= bound
    for threads in (0, 2):
        again = find_build(name).load(make, tmp_path, threads)
        assert largest_error(again, parent, calls) <= bound


@dataclass
class Ways:
    """NNCF and OpenVINO for a build, of which each way of quantising is off by an error that is given."""

    errors: list[float]
    tried: list[dict[str, Any]] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    def quantize(self, model: Any, inputs: Any, **way: Any) -> int:
        """The number of the way."""
        self.tried.append({key: value for key, value in way.items() if key != "subset_size"})
        return len(self.tried) - 1

    def runner(self, number: int, threads: int) -> Callable[[list[Any]], list[Any]]:
        """What adds the way's error to a row of ones."""
        return lambda arrays: [np.full((1, 4), 1 + self.errors[number])]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    """In the places of the libraries; errors are to be filled in."""
    from marserve_handlers.optimising.builds import openvino_float

    ways = Ways([])
    library = SimpleNamespace(
        quantize=ways.quantize,
        Dataset=list,
        ModelType=SimpleNamespace(TRANSFORMER="transformer"),
        AdvancedSmoothQuantParameters=lambda **alphas: alphas,
        AdvancedQuantizationParameters=lambda **parameters: parameters,
    )
    monkeypatch.setitem(sys.modules, "nncf", library)
    monkeypatch.setattr(openvino_float, "read", lambda material, folder: SimpleNamespace(clone=lambda: None))
    monkeypatch.setattr(openvino_float, "runner", ways.runner)
    monkeypatch.setattr(openvino_float, "save", lambda model, folder: ways.saved.append(model))
    return ways


class Ones(torch.nn.Module):  # type: ignore[misc]
    """A row of ones, which its attention does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 1)

    def forward(self, rows: Any) -> Any:
        """Always the same."""
        return torch.ones(1, 4)


@pytest.mark.parametrize(
    ("errors", "saved", "tried"),
    [
        ([0.004, 0.001, 0.001], 0, 1),
        ([0.3, 0.004, 0.001], 1, 2),
        ([0.3, math.nan, 0.05], 2, 3),
        ([math.nan, 0.1, 0.2], 1, 3),
    ],
)
def test_the_first_way_to_quantise_that_is_near_enough_is_taken_else_the_nearest(
    errors: list[float], saved: int, tried: int, ways: Ways, tmp_path: Path
) -> None:
    """By the inputs that calibrate; ways after one that is near enough cost no time."""
    ways.errors = errors

    find_build("openvino-int8").build(Material(Ones(), [Call((torch.zeros(1, 4),), {})], 8), tmp_path)

    assert ways.saved == [saved]
    assert len(ways.tried) == tried


def test_attention_is_not_smoothed_at_first(ways: Ways, tmp_path: Path) -> None:
    """Smoothed, encoders that average over their tokens were a third of the mean output off."""
    ways.errors = [0.5, 0.0]

    find_build("openvino-int8").build(Material(Ones(), [Call((torch.zeros(1, 4),), {})], 8), tmp_path)

    unsmoothed = {"smooth_quant_alphas": {"convolution": -1, "matmul": -1}}
    assert ways.tried == [
        {"model_type": "transformer", "advanced_parameters": unsmoothed},
        {"model_type": "transformer"},
    ]


@pytest.mark.onnx
def test_a_branch_on_the_batch_size_is_refused_and_not_baked(tmp_path: Path) -> None:
    """With what torch.export says of it."""
    pytest.importorskip("onnxscript")
    calls = [Call((torch.ones(1, 3),), {}) for _ in range(2)]

    with pytest.raises(CannotBuild, match=r"torch\.export refuses it: "):
        made("onnx", lambda: Branches().eval(), calls, tmp_path)


@pytest.mark.onnx
def test_an_onnx_model_is_quantised_as_it_is_and_stays_a_session(tmp_path: Path) -> None:
    """Exported from a module first; other builds refuse it."""
    pytest.importorskip("onnxscript")
    from marserve_handlers.runtimes.onnx import open_session
    from marserve_handlers.support.comparing.held_models import is_session

    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    find_build("onnx").build(Material(Pictures().eval(), pictures(), 8), first)
    session = open_session(str(first / "model.onnx"), threads=1)
    (name,) = [node.name for node in session.get_inputs()]
    calls = [Call((), {name: as_numpy(call.args[0])}) for call in pictures()]

    model = made("onnx-int8", lambda: session, calls, second)

    assert is_session(model)
    assert largest_error(model, session, calls) <= ROUNDED
    for other in ("onnx", "bf16", "channels-last", "openvino"):
        with pytest.raises(CannotBuild):
            find_build(other).build(Material(session, calls, 8), second)


def test_what_does_not_suit_is_refused_with_a_reason() -> None:
    """Layouts of what has no pictures, and names that are none."""
    with pytest.raises(CannotBuild, match="no weights with four axes"):
        find_build("channels-last").build(Material(Words(), words(), 8), Path())
    with pytest.raises(CannotBuild, match="no weights in float32"):
        find_build("bf16").build(Material(Branches(), [], 8), Path())
    with pytest.raises(CannotBuild, match="there is no build 'fp16'"):
        find_build("fp16")
    for name in ("compile", "aot"):
        with pytest.raises(
            CannotBuild, match=r"torch\.(compile takes modules of Python alone|export refuses TorchScript)"
        ):
            find_build(name).build(Material(traced(Pictures(), torch.zeros(2, 1, 8, 8)), pictures(), 8), Path())


def test_the_server_tries_the_builds_that_there_are() -> None:
    """Both lists have the same names, and of native code, too."""
    from marserve.optimise.candidates import NAMES, NATIVE

    assert list(NAMES) == list(BUILDS)
    assert set(NATIVE) == builds.NATIVE
