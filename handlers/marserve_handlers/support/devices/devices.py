"""Decides which device a worker computes on. Pure: the caller says which kinds there are, nothing is probed here."""

from __future__ import annotations

from collections.abc import Collection


class Device(str):
    """A device's name as torch writes it (`cpu`, `cuda:1`), for workers that have no torch loaded.

    `type` and `index` are those of `torch.device`, so that handlers read either alike.
    """

    __slots__ = ()

    @property
    def type(self) -> str:
        """The kind: `cpu`, `cuda`, `xpu`, `mps`."""
        return self.partition(":")[0]

    @property
    def index(self) -> int | None:  # type: ignore[override] # torch.device's word, which hides str.index
        """The number behind the colon, or None."""
        number = self.partition(":")[2]
        return int(number) if number else None


def choose_device(gpu_id: int | None, available: Collection[str], device_type: str | None = None) -> Device:
    """The device for a worker that was given `gpu_id` (None: no accelerator) where `available` kinds exist.

    `cuda:{gpu_id}` (ROCm too: torch calls it so), else `xpu:{gpu_id}`, each only with a gpu id; else `mps`, which is
    one device and needs no id; else `cpu`. `device_type` is the model configuration's word: `cpu` rules the rest out.
    """
    if device_type is not None and device_type.lower() == "cpu":
        return Device("cpu")
    if gpu_id is not None:
        for kind in ("cuda", "xpu"):
            if kind in available:
                return Device(f"{kind}:{gpu_id}")
    return Device("mps") if "mps" in available else Device("cpu")
