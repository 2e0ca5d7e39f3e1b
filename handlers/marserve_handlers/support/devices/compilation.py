"""Reads the `pt2` part of a model's configuration: whether, and how, the model is compiled. Knows no torch.

Also looks for the compiler that torch's own backend needs, as torch and Triton do.
"""

from __future__ import annotations

import enum
import logging
import os
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)


class PT2Backend(str, enum.Enum):  # a StrEnum, which Python 3.10 lacks
    """The compiler backends that a model's configuration may name."""

    EAGER = "eager"
    AOT_EAGER = "aot_eager"
    INDUCTOR = "inductor"
    NVFUSER = "nvfuser"
    AOT_NVFUSER = "aot_nvfuser"
    AOT_CUDAGRAPHS = "aot_cudagraphs"
    OFI = "ofi"
    FX2TRT = "fx2trt"
    ONNXRT = "onnxrt"
    IPEX = "ipex"
    TORCHXLA_TRACE_ONCE = "torchxla_trace_once"
    OPENVINO = "openvino"
    TENSORRT = "tensorrt"
    HPU_BACKEND = "hpu_backend"

    __str__ = str.__str__


def check_valid_pt2_backend(backend: object) -> bool:
    """Whether `backend` is a name of PT2Backend; another one is warned of."""
    if backend in {known.value for known in PT2Backend}:
        return True
    logger.warning("%s is no backend that models can be compiled with; the model runs without compilation", backend)
    return False


def read_compile_options(model_config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The arguments for `torch.compile`, or None when the model is not to be compiled.

    Three forms of `pt2`: `{compile: {enable: true, backend: …, mode: …}}`, where all but `enable` is passed on;
    `inductor`, a backend alone; `{backend: …, mode: …}`, the options themselves. An unknown backend is warned of
    and gives None, and so does `compile` without `enable: true`.
    """
    pt2 = (model_config or {}).get("pt2")
    if not pt2:
        return None
    if isinstance(pt2, str):
        options: dict[str, Any] = {"backend": pt2}
    elif not isinstance(pt2, Mapping):
        logger.warning("pt2 of the model's configuration must be a backend's name or a map, not %r; ignored", pt2)
        return None
    elif isinstance(pt2.get("compile"), Mapping):
        options = dict(pt2["compile"])
        if "enable" not in options:
            logger.warning("pt2.compile of the model's configuration has no `enable`; the model is not compiled")
        if not options.pop("enable", False):
            return None
    else:
        options = {key: value for key, value in pt2.items() if key not in ("export", "compile")}
        if not options:
            return None
    if "backend" in options and not check_valid_pt2_backend(options["backend"]):
        return None
    return options


def find_missing_compiler(options: Mapping[str, Any], device_type: str) -> str:
    """What is missing for compiling on a device of that type, in a sentence without its stop; empty if nothing is.

    Backend `inductor`, which is torch's default, writes C++ for the processor. For CUDA and ROCm it writes Triton's
    language, and Triton builds the launchers of its kernels with a C compiler.
    """
    if options.get("backend", PT2Backend.INDUCTOR.value) != PT2Backend.INDUCTOR.value:
        return ""
    if device_type == "cpu":
        if os.environ.get("TORCH_INDUCTOR_INSTALL_GXX") == "1" or _is_there("CXX", "g++"):
            return ""
        return "there is no C++ compiler: neither g++ nor what CXX names"
    if device_type == "cuda" and not _is_there("CC", "gcc", "clang"):
        return "there is no C compiler for Triton: neither gcc, clang nor what CC names"
    return ""


def _is_there(variable: str, *names: str) -> bool:
    """Whether the program exists that an environment variable names, or else one of these."""
    try:
        named = shlex.split(os.environ.get(variable, ""))[:1]
    except ValueError:
        return True  # torch will say what is wrong with it
    return any(shutil.which(name) is not None for name in named or names)


def wants_aot_compile(model_config: Mapping[str, Any] | None) -> bool:
    """Whether `pt2: {export: {aot_compile: true}}` says that the serialized file was compiled ahead of time."""
    pt2 = (model_config or {}).get("pt2")
    export = pt2.get("export") if isinstance(pt2, Mapping) else None
    return isinstance(export, Mapping) and bool(export.get("aot_compile"))
