"""JSON's whole numbers for a program that does not declare its dtypes: `[1, 2]` where it computes with floats."""

from __future__ import annotations

import itertools
import re
from typing import Any

import torch

from marserve_handlers.runtimes.tensors import run

# How torch calls whole numbers when an operator does not take them; layers divided over ranks do not name them.
_WHOLE = re.compile(r"\b(Long|long long|int64|long int)\b|must have the same dtype")


class WholeNumbers:
    """Runs a program on whole numbers as they are; where it refuses their dtype, in the dtype of its parameters.

    They are tried as they are first, because token ids are whole numbers for a program with float parameters.
    """

    def __init__(self, model: Any) -> None:
        self._dtype = _floating_dtype(model)
        self._refuses_whole = False

    def run(self, model: Any, data: Any, device: Any) -> Any:
        """What the model gives for `data`. Raises what the model raises."""
        if self._dtype is None or data.dtype != torch.int64:
            return run(model, data, device, (), {})
        if not self._refuses_whole:
            try:
                return run(model, data, device, (), {})
            except RuntimeError as error:
                if not _WHOLE.search(str(error)):
                    raise
        given = run(model, data.to(self._dtype), device, (), {})
        self._refuses_whole = True
        return given


def _floating_dtype(model: Any) -> torch.dtype | None:
    """The dtype of the first floating parameter or buffer; None without one."""
    if not isinstance(model, torch.nn.Module):
        return None
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
