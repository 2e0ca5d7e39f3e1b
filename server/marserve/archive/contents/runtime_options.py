"""What a configuration says to the runtimes of built-in handlers, `onnx`, `pt2` and `parallel`, judged without them.

Only models of built-in handlers are refused for it: handlers of an author's own may have such keys for themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marserve.archive.contents.built_in_handlers import BUILT_IN_HANDLERS
from marserve.archive.contents.manifest import Manifest
from marserve.errors import BadArchive
from marserve.files.nearest import did_you_mean

ONNX_KEYS = (
    "providers",
    "provider_options",
    "fallback",
    "intra_op_num_threads",
    "inter_op_num_threads",
    "graph_optimization_level",
    "execution_mode",
    "enable_mem_pattern",
    "enable_cpu_mem_arena",
    "log_severity_level",
    "config_entries",
)
"""As `marserve_handlers.runtimes.onnx.OPTIONS`."""
_WORDS = {
    "graph_optimization_level": ("disable", "basic", "extended", "all"),
    "execution_mode": ("sequential", "parallel"),
}
_FLAGS = ("fallback", "enable_mem_pattern", "enable_cpu_mem_arena")
_NUMBERS = ("intra_op_num_threads", "inter_op_num_threads", "log_severity_level")
_MAPS = ("provider_options", "config_entries")


def check_runtime_options(document: Mapping[str, Any] | None, manifest: Manifest) -> None:
    """Raise BadArchive for `onnx` of an ONNX model, `pt2` or `parallel` that a built-in handler cannot use."""
    if not document or (manifest.handler or "") not in BUILT_IN_HANDLERS:
        return
    parallel = document.get("parallel")
    if isinstance(parallel, dict) and "mesh" in parallel and not manifest.model_file:
        raise BadArchive(
            f"parallel divides eager models alone, and the archive has {manifest.serialized_file or 'a model'} and no "
            "modelFile: archive the model's class (--model-file) with its weights, or leave parallel out."
        )
    if (manifest.serialized_file or "").endswith(".onnx"):
        _check_onnx(document.get("onnx"))
    _check_pt2(document.get("pt2"))


def _check_onnx(onnx: object) -> None:
    if onnx is None:
        return
    if not isinstance(onnx, dict):
        raise _bad("onnx", onnx, "a map, as {providers: [OpenVINO, CPU]}")
    for key, value in onnx.items():
        name = f"onnx.{key}"
        if key not in ONNX_KEYS:
            hint = did_you_mean(str(key), ONNX_KEYS, ".")
            raise BadArchive(f"{name} of the model's configuration is no key: there are {', '.join(ONNX_KEYS)}{hint}")
        if key == "providers":
            names = [value] if isinstance(value, str) else value
            if not isinstance(names, list) or not names or not all(isinstance(each, str) and each for each in names):
                raise _bad(name, value, "a list of providers in order, as [OpenVINO, CPU]")
        elif key in _FLAGS and not isinstance(value, bool):
            raise _bad(name, value, "true or false")
        elif key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise _bad(name, value, "a whole number of 0 or more")
        elif key in _MAPS and value is not None and not isinstance(value, dict):
            raise _bad(name, value, "a map")
        elif key in _WORDS and _word(value) not in _WORDS[key]:
            raise _bad(name, value, f"one of {', '.join(_WORDS[key])}")


def _word(value: object) -> str:
    return str(value).lower().removeprefix("ort_").removeprefix("enable_").removesuffix("_all")


def _check_pt2(pt2: object) -> None:
    """TorchServe ignores a backend that it does not know, and says so in the log; so does the handler."""
    if isinstance(pt2, dict):
        for part in ("compile", "export"):
            value = pt2.get(part)
            if value is not None and not isinstance(value, dict):
                raise _bad(f"pt2.{part}", value, "a map, as {enable: true}" if part == "compile" else "a map")


def asks_to_compile(document: Mapping[str, Any] | None) -> bool:
    """Whether `pt2` asks for the model to be compiled by torch, as handlers read it; its backend need not be known."""
    pt2 = (document or {}).get("pt2")
    if not isinstance(pt2, dict):
        return isinstance(pt2, str) and pt2 != ""
    if isinstance(pt2.get("compile"), dict):
        return bool(pt2["compile"].get("enable"))
    return bool(pt2.keys() - {"compile", "export"})


def _bad(key: str, value: object, right: str) -> BadArchive:
    shown = repr(value)
    return BadArchive(f"{key} of the model's configuration is {shown[:60]}; it must be {right}.")
