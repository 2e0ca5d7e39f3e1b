"""The parent's weights laid out with channels last, as convolutions of a processor like them. The same arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from marserve_handlers.optimising.builds import CannotBuild, Parent
from marserve_handlers.optimising.material import Material


def build(material: Material, folder: Path) -> None:
    """Nothing is written: the layout is made at the load."""
    if material.is_session:
        raise CannotBuild("an ONNX model has no memory layout of torch's")
    if not any(parameter.dim() == 4 for parameter in material.model.parameters()):
        raise CannotBuild("it has no weights with four axes, so no convolution of pictures")


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """The parent in the other layout; its inputs are laid out at each call."""
    return _ChannelsLast(parent())


class _ChannelsLast(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        laid_out = [_laid_out(each) for each in args]
        return self.model(*laid_out, **{name: _laid_out(each) for name, each in kwargs.items()})


def _laid_out(value: Any) -> Any:
    is_picture = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_picture else value
