"""The most FLOPs a second that a machine was seen to do (`flops/peak.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from marserve_handlers.flops import peak
from marserve_handlers.flops.cost import NotCounted
from marserve_handlers.flops.peak import TIMES, cached_peak, measure, peak_of


def test_the_best_of_some_times_is_kept(tmp_path: Path) -> None:
    """Other work on the machine makes it look slower: by itself for each dtype, number of threads and device."""
    seen = iter([3.0, 9.0, 5.0])

    said = [peak_of("float32", 2, "cpu", tmp_path, lambda *_: next(seen)) for _ in range(TIMES + 2)]

    assert said == [3.0, 9.0, 9.0, 9.0, 9.0]
    assert peak_of("bfloat16", 2, "cpu", tmp_path, lambda *_: 1.0) == 1.0
    assert peak_of("float32", 1, "cpu", tmp_path, lambda *_: 2.0) == 2.0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"KEY": 1}', '{"KEY": ["x", 1]}'])
def test_a_file_that_holds_something_else_is_written_anew(tmp_path: Path, text: str) -> None:
    """Nobody has to clear it away."""
    peak_of("float32", 2, "cpu", tmp_path, lambda *_: 3.0)
    [key] = json.loads((tmp_path / "peaks.json").read_text())
    (tmp_path / "peaks.json").write_text(text.replace("KEY", key))

    assert peak_of("float32", 2, "cpu", tmp_path, lambda *_: 4.0) == 4.0


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures could be anything."""
    monkeypatch.setattr(peak.os, "getuid", lambda: -1)

    with pytest.raises(PermissionError, match="another user's"):
        peak_of("float32", 2, "cpu", tmp_path, lambda *_: 3.0)


@pytest.mark.torch
def test_a_dtype_that_torch_does_not_have_is_not_measured() -> None:
    """An archive of the future."""
    pytest.importorskip("torch")

    with pytest.raises(ValueError, match="torch has no dtype no_such"):
        measure("no_such", 1, "cpu")


@pytest.mark.torch
@pytest.mark.system
def test_a_processor_is_measured_by_a_process_of_its_own(tmp_path: Path) -> None:
    """What it says is in the folder's file."""
    pytest.importorskip("torch")

    said = cached_peak("float32", 1, "cpu", tmp_path)

    assert said >= 1e9
    assert list(json.loads((tmp_path / "peaks.json").read_text()).values()) == [[said, 1]]


@pytest.mark.parametrize(
    ("dtype", "device", "of_torch", "of_onnxruntime", "best"),
    [
        ("float32", "cpu", 4.0, 9.0, 9.0),
        ("float32", "cpu", 9.0, 4.0, 9.0),
        ("bfloat16", "cpu", 4.0, 9.0, 4.0),
        ("float32", "cuda:0", 4.0, 9.0, 4.0),
        ("float32", "cpu", None, 9.0, 9.0),
        ("float32", "cpu", 4.0, None, 4.0),
    ],
)
def test_the_best_library_counts_of_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    device: str,
    of_torch: float | None,
    of_onnxruntime: float | None,
    best: float,
) -> None:
    """ONNX Runtime for float32 on processors alone."""

    def saying(value: float | None) -> Callable[..., float]:
        def say(*_: object) -> float:
            if value is None:
                raise ImportError
            return value

        return say

    monkeypatch.setattr(peak, "_by_torch", saying(of_torch))
    monkeypatch.setattr(peak, "_by_onnxruntime", saying(of_onnxruntime))

    assert measure(dtype, 1, device) == best


@pytest.mark.parametrize(("dtype", "device"), [("float32", "cpu"), ("float32", "other")])
def test_what_cannot_be_measured_asks_for_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, device: str
) -> None:
    """The key is named, whether the process fails or the device is another library's."""
    monkeypatch.setattr(peak.sys, "executable", "/bin/false")
    with pytest.raises(NotCounted, match="give peakFlops a number"):
        cached_peak(dtype, 1, device, tmp_path)
