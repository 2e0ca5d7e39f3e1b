"""Torch's side of a handler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from marserve_handlers.runtimes import tensors  # noqa: E402

pytestmark = pytest.mark.torch


def test_devices_are_looked_for_only_with_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for CUDA can make a process unfit for forking; a worker on the CPU never asks."""

    def forbidden() -> bool:
        raise AssertionError("asked for CUDA")

    monkeypatch.setattr(torch.cuda, "is_available", forbidden)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert tensors.find_device(None) == torch.device("cpu")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert tensors.find_device(2) == torch.device("cuda:2")
    assert tensors.find_device(2, "cpu") == torch.device("cpu")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert tensors.find_device(1) == torch.device("xpu:1")

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert tensors.find_device(None) == torch.device("mps")


def test_arrays_become_tensors_without_a_copy() -> None:
    """The model reads the memory that the pictures were written to."""
    array = np.zeros((2, 3), dtype=np.float32)
    tensor = tensors.as_tensor(array, torch.device("cpu"))
    array[0, 0] = 7

    assert tensor[0, 0] == 7


def test_rows_are_stacked() -> None:
    """Tensors, arrays and lists; as float32 where they are lists."""
    rows: list[Any] = [torch.ones(2), np.ones(2, dtype=np.float32), [1, 1]]

    assert tensors.stack(rows, "cpu").tolist() == [[1.0, 1.0]] * 3
    assert tensors.stack([[1, 2]], "cpu").dtype == torch.float32


def test_models_run_in_inference_mode() -> None:
    """No gradients are kept; further arguments reach the model."""
    seen: list[Any] = []

    def model(data: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((torch.is_inference_mode_enabled(), args, kwargs))
        return data + 1

    assert tensors.run(model, torch.ones(1), "cpu", (2,), {"a": 3}).tolist() == [2.0]
    assert seen == [(True, (2,), {"a": 3})]


class Noted:
    """A worker's context, of which what is noted for describe counts."""

    def __init__(self) -> None:
        self.load_warnings: list[str] = []


def test_what_torch_does_not_compile_at_all_stays_as_it_was() -> None:
    """Describe says why."""
    model = torch.nn.Linear(1, 1)
    noted = Noted()

    assert tensors.compile_model(model, {"backend": "no such backend"}, "cpu", noted) is model
    (sentence,) = noted.load_warnings
    assert sentence.startswith("pt2 is not used, the model runs eagerly: InvalidBackend: ")


def test_without_a_compiler_a_model_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of torch's is tried: describe has a sentence of what is missing."""
    monkeypatch.setattr(tensors, "find_missing_compiler", lambda options, device_type: f"no compiler for {device_type}")
    model = torch.nn.Linear(1, 1)
    noted = Noted()

    assert tensors.compile_model(model, {"backend": "inductor"}, "cpu", noted) is model
    assert noted.load_warnings == ["pt2 is not used, the model runs eagerly: no compiler for cpu"]


@pytest.mark.parametrize("is_module", [True, False])
def test_a_model_whose_compiling_fails_at_a_call_answers_and_runs_eagerly_from_then_on(is_module: bool) -> None:
    """No request fails, and torch does not try again."""
    tried: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        tried.append(1)
        raise RuntimeError("Python.h: No such file\nand more")

    linear = torch.nn.Linear(2, 2).eval()
    model: Any = linear if is_module else (lambda data: linear(data))
    noted = Noted()
    compiled = tensors.compile_model(model, {"backend": backend}, "cpu", noted)

    with torch.inference_mode():
        answers = [compiled(torch.ones(rows, 2)) for rows in (1, 2, 3)]

    assert all(torch.equal(answer, linear(torch.ones(rows, 2))) for rows, answer in enumerate(answers, 1))
    assert len(tried) == 1
    (sentence,) = noted.load_warnings
    assert "BackendCompilerFailed: " in sentence
    assert "\n" not in sentence


def test_what_a_compiled_model_has_against_its_inputs_is_not_taken_for_a_failed_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client could have the model run slowly for good. Memory that ran out, or a lost device, costs no second run."""
    noted = Noted()
    linear = torch.nn.Linear(2, 2).eval()
    compiled = tensors.compile_model(linear, {"backend": "eager"}, "cpu", noted)
    errors = [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
    ]

    with torch.inference_mode(), pytest.raises(RuntimeError, match="shapes"):
        compiled(torch.ones(1, 3))
    for error in errors:

        def fail(data: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(tensors.torch, "compile", lambda model, fail=fail, **options: fail)
        with pytest.raises(type(error)):
            tensors.compile_model(lambda data: data, {}, "meta", noted)(1)

    assert noted.load_warnings == []


def test_a_compiled_model_answers_alike() -> None:
    """With the backend that needs no compiler."""
    model = torch.nn.Linear(2, 2).eval()
    compiled = tensors.compile_model(model, {"backend": "eager"}, "cpu", Noted())

    assert compiled is not model
    with torch.inference_mode():
        assert torch.equal(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_profiling_leaves_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result and the profiler come back, the trace lies under the model's name."""
    monkeypatch.setattr(tensors.tempfile, "gettempdir", lambda: str(tmp_path))
    result, profiler = tensors.profile(lambda: torch.ones(2).sum().item(), "digits", {})

    assert result == 2.0
    assert profiler is not None
    assert list((tmp_path / "pytorch_profiler" / "digits").glob("*.json"))
