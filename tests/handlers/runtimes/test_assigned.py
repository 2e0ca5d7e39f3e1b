"""Tests for devices that a worker was given and torch cannot use: why, and what fits; with torch's answers made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from marserve_handlers.errors import ModelNotLoadable  # noqa: E402
from marserve_handlers.runtimes import assigned, tensors  # noqa: E402
from marserve_handlers.support.devices import driver  # noqa: E402
from support.model_context import make_context  # noqa: E402

pytestmark = pytest.mark.torch

NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build\nGCC version:  gcc 13.2.0"


class Machine:
    """A torch of a build, on a machine with a driver and so many devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, built: str | None, devices: int, most: str, init: str = ""):
        def begin() -> None:
            if init:
                raise RuntimeError(init)

        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "init", begin)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
        monkeypatch.setattr(assigned, "driver_cuda", lambda: most)
        monkeypatch.setattr(driver, "driver_cuda", lambda: most)
        monkeypatch.setattr(driver, "driver_version", lambda: "535.104.05" if most else "")


def test_a_driver_that_is_too_old_is_told_with_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's version and CUDA's, the driver's and its CUDA, the oldest driver that would do."""
    words = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update"
    Machine(monkeypatch, built="13.0", devices=0, most="12.2", init=words)

    assert assigned.why_unusable(1) == (
        f"The worker was given device 1, which torch {torch.__version__} cannot use: The NVIDIA driver on your system "
        "is too old (found version 12020). The driver is 535.104.05, for CUDA 12.2 at most: torch is built for CUDA "
        "13.0, which needs driver 580 or later; or install a torch that is built for CUDA 12.2 or earlier. With "
        "deviceType: cpu the model needs no device."
    )


def test_a_build_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the build that would do; and where no driver is to be seen."""
    Machine(monkeypatch, built=None, devices=0, most="12.2")
    with_driver = assigned.why_unusable(0)
    Machine(monkeypatch, built=None, devices=0, most="")

    assert (
        "it is a build for processors alone. The driver is 535.104.05, for CUDA 12.2 at most: install a build of torch "
        in (with_driver)
    )
    assert "for CUDA 12.2 or earlier" in with_driver
    assert "The driver is not to be seen: install a build of torch for CUDA." in assigned.why_unusable(0)


def test_a_number_beyond_torchs_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server and torch count otherwise."""
    Machine(monkeypatch, built="13.0", devices=1, most="13.0")

    assert assigned.why_unusable(0) == ""
    assert "given device 1, which" in assigned.why_unusable(1)
    assert "it finds 1 of them" in assigned.why_unusable(1)


def test_a_kernel_is_run_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that torch counts may have no kernels in this build; running out of memory is another matter."""
    Machine(monkeypatch, built="13.0", devices=1, most="13.0")
    words = "CUDA error: no kernel image is available for execution on the device\nFor debugging"
    error = RuntimeError(words)

    def ones(*size: int, device: Any) -> Any:
        raise error

    monkeypatch.setattr(torch, "ones", ones)

    assert "cannot use: CUDA error: no kernel image is available for execution on the device. The driver" in (
        assigned.why_unusable(0, "cuda:0")
    )
    error = RuntimeError("CUDA error: out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        assigned.why_unusable(0, "cuda:0")


def test_a_built_in_handlers_device_is_used_or_the_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where devices need not be used it is a warning; a worker without one, and one for the CPU, ask nothing."""
    Machine(monkeypatch, built="13.0", devices=0, most="12.2", init="too old")
    context = make_context(gpu_id=1)
    context.must_use_device = True

    with pytest.raises(ModelNotLoadable, match="given device 1, which torch"):
        tensors.own_device(context, 1)
    context.must_use_device = False
    assert tensors.own_device(context, 1) == torch.device("cpu")
    assert [warning.endswith("The model computes on the CPU") for warning in context.load_warnings] == [True]
    assert tensors.own_device(context, None) == torch.device("cpu")
    assert tensors.own_device(context, 1, "cpu") == torch.device("cpu")
    assert len(context.load_warnings) == 1


def test_apples_device_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one, and it is there."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)

    assert assigned.why_unusable(0) == ""


def test_the_drivers_version_is_read_from_the_kernel(tmp_path: Path) -> None:
    """Nothing where there is none."""
    (tmp_path / "version").write_text(NVRM)

    assert driver.driver_version(tmp_path / "version") == "535.104.05"
    assert driver.driver_version(tmp_path / "none") == ""
    assert driver.describe_driver().startswith("the driver is ")
