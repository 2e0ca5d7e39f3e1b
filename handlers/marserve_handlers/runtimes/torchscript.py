"""Loads TorchScript models. Only torch's own reader opens the file, which runs no Python of it."""

from __future__ import annotations

import os
from typing import Any

import torch

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.runtimes.tensors import deprecations_ignored
from marserve_handlers.support.devices.device_errors import is_out_of_memory, words_of_loss


def load_torchscript(path: str, device: Any) -> torch.nn.Module:
    """The TorchScript model of `path` on `device`, in evaluation mode.

    Raises ModelNotLoadable when the file is no TorchScript, with a hint when it holds weights alone.
    """
    try:
        with deprecations_ignored():
            model: torch.nn.Module = torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if is_out_of_memory(error) or words_of_loss(error):  # which says nothing of the file
            raise
        raise ModelNotLoadable(
            f"{os.path.basename(path)} is no TorchScript model that can be loaded on {device}. Saved weights (a state "
            "dict) need the archive's modelFile beside them."
        ) from error
    model.eval()
    return model
