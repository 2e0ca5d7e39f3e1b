"""Whether a loaded model can compute on the device that its worker was given, as far as torch can tell.

A handler that asks `torch.cuda.is_available()`, and goes on without, computes on the processor, and nothing else shows
that. If another runtime is loaded, too, it may use the device: then there is only a warning. That torch is loaded says
nothing: workers with devices are forked from a process that has imported it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import ModuleType

from marserve.worker.load import LoadedModel
from marserve_handlers.errors import ModelNotLoadable

_OTHER_RUNTIMES = (
    *("onnxruntime", "tensorrt", "tensorrt_llm", "vllm", "tensorflow", "jax", "cupy", "ctranslate2", "llama_cpp"),
    *("paddle", "numba.cuda", "pycuda", "openvino", "faiss"),
)
_OF_TORCH = ("torch", "torchvision", "torchaudio", "transformers", "diffusers", "sentence_transformers", "ultralytics")


def check_device_use(model: LoadedModel) -> None:
    """Check a loaded model. Raises ModelNotLoadable if its device must be used and cannot be.

    A handler that has said what it computes on, or has warned, has checked this itself.
    """
    load, context = model.load, model.context
    if load.gpu_id is None or context.computes_on or context.load_warnings or not _uses_torch(load.model_dir):
        return
    from marserve_handlers.runtimes.assigned import why_unusable  # here: it imports torch

    reason = why_unusable(load.gpu_id)
    if not reason:
        return
    if load.must_use_device and not any(name in sys.modules for name in _OTHER_RUNTIMES):
        raise ModelNotLoadable(reason)
    context.load_warnings.append(reason)


def _uses_torch(folder: str) -> bool:
    """Whether a module of the archive has imported torch, or something of torch or transformers."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    roots = (folder + os.sep, os.path.realpath(folder) + os.sep)
    for module in list(sys.modules.values()):
        with contextlib.suppress(Exception):  # any object may be in `sys.modules`
            names = vars(module)  # not getattr: some of torch's modules raise for names that they do not have
            file = names.get("__file__")
            if not isinstance(file, str) or not file.startswith(roots):
                continue
            if any(value is torch or _is_of_torch(value) for value in list(names.values())):
                return True
    return False


def _is_of_torch(value: object) -> bool:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] in _OF_TORCH
