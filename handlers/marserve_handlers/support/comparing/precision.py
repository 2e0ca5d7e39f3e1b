"""How far the answers of a batch may be from those of its items alone, by the precision that a model computes in.

A batch is another matrix than a single item: libraries choose other kernels for it, which add up in another order. In
float32 on a processor that is noise far below the usual bound; in bfloat16, float16 and TF32 it is not. Precision is
taken from the parameters, their device, and from what the model's modules give while a check calls them. Torch and ONNX
Runtime are only looked at where a model of theirs is there.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Any

from marserve_handlers.batch_check import Tolerance
from marserve_handlers.support.comparing.held_models import is_session, models_of

# The distance between 1 and the next number.
_STEPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "tf32": 2.0**-10}
# A sum of many terms is off by several steps: of itself, and, where terms cancel out, of the largest beside it.
_STEPS_OF_ITSELF, _STEPS_OF_THE_LARGEST, _STEPS_OF_ONE = 16, 4, 1


class Precision:
    """The precisions that a handler's models compute in. Use it as a context manager around a check's calls."""

    def __init__(self, handle: Any) -> None:
        self._found: dict[str, str] = {}
        self._hooks: list[Any] = []
        with contextlib.suppress(Exception):  # the author's objects may do anything when they are looked at
            for model in models_of(handle):
                self._look_at(model)

    def __enter__(self) -> Precision:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            with contextlib.suppress(Exception):
                hook.remove()

    def bound(self, tolerance: Tolerance) -> Tolerance:
        """The bound for what was seen: the least precise counts. As it was where all is float32 or more."""
        name = max(self._found, key=lambda name: _STEPS[name], default=None)
        if name is None:
            return tolerance
        step = _STEPS[name]
        return replace(
            tolerance,
            relative=max(tolerance.relative, _STEPS_OF_ITSELF * step),
            absolute=max(tolerance.absolute, _STEPS_OF_ONE * step),
            of_largest=_STEPS_OF_THE_LARGEST * step,
        )

    @property
    def basis(self) -> str:
        """What the bound was taken from: `bfloat16 on cuda`; `float32` where nothing less precise was seen."""
        name = max(self._found, key=lambda name: _STEPS[name], default=None)
        return "float32" if name is None else f"{name} on {self._found[name]}"

    def _look_at(self, model: Any) -> None:
        if is_session(model):
            self._look_at_session(model)
            return
        for parameter in model.parameters():
            self._note(parameter)
        with contextlib.suppress(Exception):  # a compiled or scripted module may take no hooks
            self._hooks.append(model.register_forward_hook(self._see))

    def _look_at_session(self, session: Any) -> None:
        device = "cuda" if session.get_providers()[:1] not in (["CPUExecutionProvider"], []) else "cpu"
        if device == "cuda":
            self._found["tf32"] = device  # the default of its CUDA provider
        for each in (*session.get_inputs(), *session.get_outputs()):
            name = {"tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}.get(each.type)
            if name is not None:
                self._found[name] = device

    def _see(self, module: Any, inputs: Any, output: Any) -> None:
        """What a module gives: under autocast that is less precise than its parameters."""
        outputs = list(output.values()) if isinstance(output, dict) else output
        for each in outputs if isinstance(outputs, tuple | list) else (outputs,):
            with contextlib.suppress(Exception):
                self._note(each)

    def _note(self, tensor: Any) -> None:
        name = str(tensor.dtype).rpartition(".")[2]
        device = tensor.device.type
        if name in _STEPS:
            self._found[name] = device
        elif name == "float32" and device == "cuda" and _uses_tf32():
            self._found["tf32"] = device


def _uses_tf32() -> bool:
    """Whether float32 is computed as TF32 somewhere; convolutions are, unless it is switched off."""
    backends = sys.modules["torch"].backends
    try:
        return bool(backends.cudnn.allow_tf32 or backends.cuda.matmul.allow_tf32)
    except Exception:  # settings by the newer names make torch refuse to say
        return True
