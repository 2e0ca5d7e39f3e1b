"""A handler with a made-up torch whose device is lost by a word, as CUDA's is by an index out of range.

Rows are answered with themselves and the worker's process id. `lose` loses the device in a kernel and raises; `lose in
its answer` has its own answer fail; `lose alone` puts an exception in its answer's place; `raise` only raises.
Once lost, every row fails, and so does `synchronize`.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

WORDS = "CUDA error: device-side assert triggered"


class AcceleratorError(RuntimeError):
    """Torch's."""


class Tensor:
    """An answer on the device; its way to the host fails where that is lost."""


class Device:
    """`torch.cuda`."""

    is_lost = False
    peak = 1 << 20

    def is_initialized(self) -> bool:
        """The handler uses it."""
        return True

    def device_count(self) -> int:
        """One."""
        return 1

    def memory_reserved(self, device: int) -> int:
        """Some."""
        return 1 << 20

    def max_memory_reserved(self, device: int) -> int:
        """At the most."""
        return self.peak

    def empty_cache(self) -> None:
        """Fails as all else."""
        self.synchronize(0)

    def synchronize(self, device: int) -> None:
        """Every call fails after the first that did."""
        if self.is_lost:
            raise AcceleratorError(WORDS)

    def current_stream(self, device: int) -> Any:
        """Of which the same is known."""
        return SimpleNamespace(query=lambda: self.synchronize(device))


cuda = Device()


def save(tensor: Tensor, buffer: Any) -> None:
    """Bring a tensor to the host."""
    cuda.synchronize(0)


sys.modules["torch"] = SimpleNamespace(  # type: ignore[assignment]
    cuda=cuda, Tensor=Tensor, save=save, set_num_threads=lambda number: None
)


def answer(row: str) -> Any:
    """One row's answer."""
    if row == "raise":
        raise ValueError(row)
    if row == "lose":
        cuda.is_lost = True
    if row == "lose alone":
        cuda.is_lost = True
        return AcceleratorError(WORDS)
    if row == "lose in its answer":
        cuda.is_lost = True
        return Tensor()
    cuda.synchronize(0)
    return f"{row} {os.getpid()}"


def handle(rows: Any, context: Any) -> Any:
    """Answer all rows."""
    cuda.peak = max(cuda.peak, len(rows or ()) << 20)
    return [answer(bytes(row["body"]).decode()) for row in rows] if rows else None
