"""Tests for how a worker finds out that its device is lost: what it asks and what it believes, with a made-up torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.worker.device.device_loss import find_loss

ASSERT = "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs.nvidia.com"


class Runtime:
    """`torch.cuda` of two devices, whose memory is held on some; `trouble` is what each device answers."""

    def __init__(self, held: tuple[int, ...] = (), **trouble: str) -> None:
        self.held = held
        self.trouble = trouble
        self.asked: list[tuple[str, int | None]] = []

    def is_initialized(self) -> bool:
        """It is in use."""
        return True

    def device_count(self) -> int:
        """Two."""
        return 2

    def memory_reserved(self, device: int) -> int:
        """What torch's allocator holds."""
        return 1024 * (device in self.held)

    def synchronize(self, device: int | None = None) -> None:
        """Wait for a device."""
        self._answer("synchronize", device)

    def current_stream(self, device: int | None = None) -> Any:
        """A device's stream."""
        return SimpleNamespace(query=lambda: self._answer("query", device))

    def _answer(self, how: str, device: int | None) -> bool:
        self.asked.append((how, device))
        words = self.trouble.get(f"d{device}")
        if words is not None:
            raise RuntimeError(words)
        return False  # it still computes


@pytest.fixture(autouse=True)
def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> Runtime:
    """Have the author's code imported this torch."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=runtime))
    return runtime


def test_the_workers_own_device_is_asked_and_those_that_it_holds_memory_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other: that would begin a context there."""
    seen = {}
    for held, gpu_id in (((), 1), ((0,), 1), ((1,), None), ((), None)):
        runtime = install(monkeypatch, Runtime(held))
        assert find_loss([""], gpu_id, wait=True) == ""
        seen[held, gpu_id] = [device for _, device in runtime.asked]

    assert list(seen.values()) == [[1], [0, 1], [1], []]


def test_a_worker_that_runs_other_batches_does_not_wait_for_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream is queried, which says at once that it is still at work."""
    runtime = install(monkeypatch, Runtime(d1=ASSERT))

    loss = find_loss([""], 1, wait=False)

    assert runtime.asked == [("query", 1)]
    assert loss == "device 1 is lost to the worker: RuntimeError: CUDA error: device-side assert triggered"


@pytest.mark.parametrize("words", ["CUDA error: out of memory", "operation not permitted when stream is capturing"])
def test_an_error_that_passes_is_no_loss(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """No memory for the question, a graph that is captured meanwhile."""
    install(monkeypatch, Runtime(d0=words))

    assert find_loss([""], 0, wait=True) == ""


def test_the_device_is_believed_before_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words alone count where no runtime can be asked: ONNX Runtime without torch."""
    words = ["", "RuntimeException: CUDA failure 700: an illegal memory access was encountered"]
    without_torch = find_loss(words, 0, wait=True)
    install(monkeypatch, Runtime())

    assert without_torch == f"the device is lost to the worker: {words[1]}"
    assert find_loss(words, 0, wait=True) == ""


def test_a_torch_without_accounts_is_asked_of_the_own_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old one, or one whose accounts went with the device."""
    runtime = install(monkeypatch, Runtime(d1=ASSERT))
    runtime.memory_reserved = None  # type: ignore[assignment,method-assign]

    assert find_loss([""], 1, wait=True).startswith("device 1 is lost")
