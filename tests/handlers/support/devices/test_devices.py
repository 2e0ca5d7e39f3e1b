"""Which device a worker computes on, for machines that need not be there."""

from __future__ import annotations

import pytest

from marserve_handlers.support.devices.devices import Device, choose_device


@pytest.mark.parametrize(
    ("gpu_id", "available", "device_type", "expected"),
    [
        (None, set(), None, "cpu"),
        (0, set(), None, "cpu"),
        (0, {"cuda"}, None, "cuda:0"),
        (3, {"cuda"}, None, "cuda:3"),
        (None, {"cuda"}, None, "cpu"),
        (1, {"cuda", "xpu"}, None, "cuda:1"),
        (1, {"xpu"}, None, "xpu:1"),
        (None, {"xpu"}, None, "cpu"),
        (None, {"mps"}, None, "mps"),
        (0, {"mps"}, None, "mps"),
        (0, {"mps", "cuda"}, None, "cuda:0"),
        (0, {"cuda", "mps"}, "cpu", "cpu"),
        (0, {"cuda"}, "CPU", "cpu"),
        (0, {"cuda"}, "gpu", "cuda:0"),
    ],
)
def test_the_device_follows_from_id_and_kinds(
    gpu_id: int | None, available: set[str], device_type: str | None, expected: str
) -> None:
    """A gpu id and CUDA, else XPU, else MPS, else the CPU; the configuration's `cpu` rules."""
    assert choose_device(gpu_id, available, device_type) == expected


def test_workers_round_robin_over_devices() -> None:
    """Eight workers whose ids the server dealt over three devices land on those."""
    devices = [choose_device(worker % 3, {"cuda"}) for worker in range(8)]

    assert devices == ["cuda:0", "cuda:1", "cuda:2"] * 2 + ["cuda:0", "cuda:1"]


def test_a_device_reads_like_torchs() -> None:
    """Type and index, without torch."""
    assert (Device("cuda:2").type, Device("cuda:2").index) == ("cuda", 2)
    assert (Device("cpu").type, Device("cpu").index) == ("cpu", None)
