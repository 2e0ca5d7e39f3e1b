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


def test_compiling_that_fails_leaves_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """Logged, and the model runs as it was."""
    model = torch.nn.Linear(1, 1)

    assert tensors.compile_model(model, {"backend": "no such backend"}) is model
    assert "runs without compilation" in caplog.text


def test_a_compiled_model_answers_alike() -> None:
    """With the backend that needs no compiler."""
    model = torch.nn.Linear(2, 2).eval()
    compiled = tensors.compile_model(model, {"backend": "eager"})

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
