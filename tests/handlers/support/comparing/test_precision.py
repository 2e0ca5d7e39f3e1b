"""Tests for the bounds of batch checks by the precision of a model: sound ones pass, and faults are still found."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from marserve_handlers.batch_check import Outcome, Tolerance, Verdict, check_handler, differences
from marserve_handlers.support.comparing.precision import Precision
from support.model_context import make_context

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


class Handler:
    """A network of so many features in a precision, whose noise differs with the size of the batch, as a GPU's does."""

    def __init__(self, dtype: Any, noise: float = 0.0, fault: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.model = torch.nn.Linear(64, 10).to(dtype)
        with torch.no_grad():
            self.model.weight.copy_(torch.randn(10, 64, generator=generator))
        self.dtype, self.noise, self.fault = dtype, noise, fault

    def handle(self, rows: list[Any], context: Any) -> list[Any]:
        """Lists of numbers."""
        inputs = torch.stack([torch.sin(torch.arange(64) * float(row["body"])) for row in rows]).to(self.dtype)
        with torch.inference_mode():
            outputs = self.model(inputs).float()
            outputs = outputs + self.noise * len(rows) / 4 * outputs.abs().max() * torch.cos(outputs)
            if self.fault and len(rows) > 1:
                outputs = outputs - outputs.mean(0, keepdim=True)
        answers: list[Any] = outputs.tolist()
        return answers


def check(handler: Handler, handle: Any = None) -> tuple[Verdict, Precision]:
    """Five samples, alone and in batches."""
    handle = handle or handler.handle
    rows = [{"body": number} for number in (0.1, 0.5, 0.9, 1.3, 1.7)]
    with Precision(handle) as precision:
        return check_handler(handle, make_context(), rows, batch_size=4, bound=precision.bound), precision


@pytest.mark.parametrize(("name", "noise"), [("bfloat16", 0.02), ("float16", 0.002), ("float32", 0.0)])
def test_a_sound_model_passes_and_one_whose_items_mix_does_not(name: str, noise: float) -> None:
    """With noise of a few steps of its precision, which the bound for float32 would take for a fault."""
    dtype = getattr(torch, name)

    sound, precision = check(Handler(dtype, noise))
    mixed, _ = check(Handler(dtype, noise, fault=True))

    assert sound.has_passed, sound.differences
    assert mixed.found
    assert precision.basis == ("float32" if name == "float32" else f"{name} on cpu")
    if noise:
        rows = [{"body": number} for number in (0.1, 0.5)]
        plain = check_handler(Handler(dtype, noise).handle, make_context(), rows, batch_size=2)
        assert plain.found


def test_float32_keeps_its_bound() -> None:
    """And so does a handler without a model."""
    plain = Tolerance()

    assert Precision(Handler(torch.float32).handle).bound(plain) == plain
    assert Precision(lambda rows, context: rows).bound(plain) == plain


def test_what_a_module_gives_counts_as_well() -> None:
    """Under autocast the parameters are float32 all the same; afterwards nothing is left on the module."""
    handler = Handler(torch.float32)

    def handle(rows: list[Any], context: Any) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            return handler.handle(rows, context)

    _, precision = check(handler, handle)

    assert precision.basis == "bfloat16 on cpu"
    assert not handler.model._forward_hooks


def test_a_model_is_found_where_handlers_keep_it() -> None:
    """In an object, behind an envelope, in a closure, in the module of a function; loops have an end."""
    inner = Handler(torch.bfloat16)
    envelope = SimpleNamespace(_handle=inner.handle)
    envelope.itself = envelope

    def closure(rows: list[Any], context: Any) -> Any:
        return envelope._handle(rows, context)

    assert Precision(closure).basis == "bfloat16 on cpu"
    names: dict[str, Any] = {"MODEL": torch.nn.Linear(1, 1).half()}
    exec("def handle(rows, context): return [MODEL(row) for row in rows]", names)
    assert Precision(names["handle"]).basis == "float16 on cpu"


def test_a_session_of_onnx_runtime_is_looked_at() -> None:
    """Its provider on a device computes float32 as TF32; half inputs count where it is."""

    def session(provider: str, kind: str) -> Any:
        specs = [SimpleNamespace(type=kind)]
        made = type("InferenceSession", (), {})()
        made.get_providers = lambda: [provider, "CPUExecutionProvider"]
        made.get_inputs = made.get_outputs = lambda: specs
        return made

    def basis(provider: str, kind: str) -> str:
        holder = SimpleNamespace(model=session(provider, kind))
        return Precision(lambda rows, context: holder).basis

    assert basis("CUDAExecutionProvider", "tensor(float)") == "tf32 on cuda"
    assert basis("CPUExecutionProvider", "tensor(float)") == "float32"
    assert basis("CPUExecutionProvider", "tensor(float16)") == "float16 on cpu"


@pytest.mark.parametrize(("allowed", "basis"), [(True, "tf32 on cuda"), (False, "float32"), (None, "tf32 on cuda")])
def test_float32_on_cuda_is_tf32_unless_that_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, allowed: bool | None, basis: str
) -> None:
    """Convolutions are computed so by default; with settings by the newer names torch may refuse to say."""
    made: dict[str, Any] = {"cudnn": SimpleNamespace(allow_tf32=allowed), "cuda": SimpleNamespace()}
    made["cuda"].matmul = SimpleNamespace(allow_tf32=False)
    backends = SimpleNamespace(**(made if allowed is not None else {}))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(backends=backends))
    precision = Precision(None)

    precision._note(SimpleNamespace(dtype="torch.float32", device=SimpleNamespace(type="cuda")))

    assert precision.basis == basis


BOUND = Tolerance(0.125, 0.0078, of_largest=0.03)


@pytest.mark.parametrize(
    ("seen", "wanted", "alike"),
    [
        ([10.0, 0.1], [10.0, 0.3], True),
        ([0.2, 0.1], [0.2, 0.3], False),
        ({"a": 0.9, "b": 0.0101}, {"a": 0.9, "c": 0.0102}, True),
        ({"a": 0.9, "b": 0.4}, {"a": 0.9, "c": 0.01}, False),
        ({"a": 0.9}, {"a": 0.9, "c": 0.01}, False),
        ({"a": "x"}, {"b": "x"}, False),
        ([1, 0], [2, 0], False),
    ],
)
def test_small_numbers_beside_large_ones_may_be_off_by_a_share_of_those(seen: Any, wanted: Any, alike: bool) -> None:
    """The last of the best five may be another of the same size; whole numbers and counts are exact."""
    found = list(differences(Outcome(seen), Outcome(wanted), BOUND))

    assert (not found) is alike
