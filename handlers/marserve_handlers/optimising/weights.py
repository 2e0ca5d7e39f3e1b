"""How many bytes of weights a model holds while it serves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import OF_PARENT
from marserve_handlers.support.comparing.held_models import is_session


def model_bytes(model: Any) -> int:
    """Of a module its parameters' and buffers', of a session its file's; 0 where that is not known."""
    if is_session(model):
        path = getattr(model, "_model_path", "") or ""
        return os.path.getsize(path) if path else 0
    return sum(_tensor_bytes(each) for each in (*model.parameters(), *model.buffers()))


def build_bytes(name: str, model: Any, folder: Path) -> int:
    """Of a build that was loaded from its folder: its tensors' where it is the parent changed, else its files'."""
    if name in OF_PARENT:
        return model_bytes(model)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _tensor_bytes(tensor: Any) -> int:
    """Those of a tensor; of one that is quantised those of the whole numbers and scales that it is made of.

    Such a tensor says of itself that it is as large as before.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return int(tensor.nbytes)
    return sum(_tensor_bytes(getattr(tensor, part)) for part in flatten()[0])
