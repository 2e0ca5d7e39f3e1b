"""The parent's weights and activations in bfloat16. Only where the processor computes in it: elsewhere it is slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from marserve_handlers.optimising.builds import CannotBuild, Parent
from marserve_handlers.optimising.call_arrays import leaves_of, with_leaves
from marserve_handlers.optimising.material import Material


def build(material: Material, folder: Path) -> None:
    """Nothing is written: weights are rounded at the load."""
    if material.is_session:
        raise CannotBuild("an ONNX model's weights are rounded by no library here")
    if not any(parameter.dtype is torch.float32 for parameter in material.model.parameters()):
        raise CannotBuild("it has no weights in float32")


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """The parent, rounded; it takes and gives float32 as before."""
    return _Bf16(parent())


class _Bf16(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.to(torch.bfloat16)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rounded = [_cast(each, torch.float32, torch.bfloat16) for each in args]
        given = self.model(
            *rounded, **{name: _cast(each, torch.float32, torch.bfloat16) for name, each in kwargs.items()}
        )
        return _cast(given, torch.bfloat16, torch.float32)


def _cast(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    leaves = leaves_of(value)
    return with_leaves(
        value,
        {name: leaf.to(wanted) if getattr(leaf, "dtype", None) is given else leaf for name, leaf in leaves.items()},
    )
