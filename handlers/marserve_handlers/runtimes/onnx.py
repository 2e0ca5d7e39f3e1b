"""Runs ONNX models: arrays in, arrays out, without torch. Opens a session as the model's configuration says.

ONNX Runtime 1.31 reports its use to its maker from the moment it is imported: a thread, a database in the user's cache
folder, connections. That is switched off here, before the import, unless `ORT_DISABLE_TELEMETRY` is set already.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime

from marserve_handlers.context import note_warning
from marserve_handlers.declared.declaration import Declaration
from marserve_handlers.declared.named import Spec, declare_specs
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.support.devices.device_errors import is_out_of_memory
from marserve_handlers.support.devices.driver import describe_driver

logger = logging.getLogger(__name__)

OPTIONS = (
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
"""The keys of `onnx` in a model's configuration."""

# Providers that compute on a device that torch calls `cuda`, the first that is there for a worker that has one.
_ON_DEVICES = ("CUDAExecutionProvider", "MIGraphXExecutionProvider", "ROCMExecutionProvider")
# Providers that take a device's number, and those that need CUDA's libraries.
_WITH_DEVICE_ID = (*_ON_DEVICES, "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")
_OF_CUDA = ("CUDAExecutionProvider", "TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider")
_CPU = "CPUExecutionProvider"

_LEVELS = {
    "disable": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

_MODES = {
    "sequential": onnxruntime.ExecutionMode.ORT_SEQUENTIAL,
    "parallel": onnxruntime.ExecutionMode.ORT_PARALLEL,
}

# What a session's inputs are called, and the dtype that arrays of other kinds are turned into for them.
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


def available_kinds() -> set[str]:
    """The kinds of devices, as `devices.choose_device` calls them, that ONNX Runtime can use here."""
    return {"cuda" for name in onnxruntime.get_available_providers() if name in _ON_DEVICES}


def open_session(
    path: str,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    threads: int = 0,
    context: Any = None,
    *,
    inter_threads: int = 0,
) -> onnxruntime.InferenceSession:
    """The session of the ONNX model of `path`.

    `options` is `onnx` of the model's configuration (see OPTIONS): `providers` in order of preference, by name with or
    without `ExecutionProvider`; without them CUDA for a CUDA device, then the CPU. `graph_optimization_level` is
    `disable`, `basic`, `extended` or `all`; `execution_mode` is `sequential` or `parallel`. `threads` is how many the
    worker may use inside one operator where the options do not say, 0 for ONNX Runtime's choice; `inter_threads` the
    same for operators side by side, which takes `execution_mode: parallel`.

    A provider is wanted where the options name it, or the worker of `context` has a device. With `fallback` a wanted
    one that is not there, or does not begin, is a warning of the load, and others compute in its place; that is the
    default where the context does not say that devices must be used. The context gets the providers in use.
    Raises ModelNotLoadable for a file that is no model, an unknown option, and a wanted provider that is not in use.
    """
    settings = dict(options or {})
    unknown = sorted(set(settings) - set(OPTIONS))
    if unknown:
        raise ModelNotLoadable(f"onnx of the model's configuration has unknown keys: {', '.join(unknown)}.")
    if not os.path.isfile(path):
        raise ModelNotLoadable(f"The archive's serialized file {os.path.basename(path)} is missing.")
    session_options = _session_options(settings, threads, inter_threads)
    wanted = _Wanted.of(settings, context)
    available: Sequence[str] = onnxruntime.get_available_providers()
    is_told = wanted.check(available, f"installed are {', '.join(available)}")
    providers, provider_options = _providers(settings, device, wanted, available)
    if any(name in _OF_CUDA for name in providers):
        _load_libraries()
    try:
        session = onnxruntime.InferenceSession(
            path, sess_options=session_options, providers=providers, provider_options=provider_options
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelNotLoadable(f"{os.path.basename(path)} is no ONNX model that can be run: {error}") from error
    in_use: list[str] = session.get_providers()
    if not is_told:
        wanted.check(in_use, f"it uses {', '.join(in_use)}; why it did not begin stands in the model log")
    if not wanted.may_fall_back and wanted.is_device:
        session.disable_fallback()  # else a failing call would go on on the CPU, and nothing would say so
    if context is not None:
        context.computes_on = ", ".join(in_use)
    return session


def declare_session(session: onnxruntime.InferenceSession) -> Declaration | None:
    """What the model's own inputs and outputs declare; None for other types than numbers, and for scalars."""

    def specs(nodes: Any) -> list[Spec]:
        names = [(node.name, _DTYPES.get(node.type), node.shape) for node in nodes]
        return [(name, None if dtype is None else np.dtype(dtype).name, shape) for name, dtype, shape in names]

    return declare_specs(specs(session.get_inputs()), specs(session.get_outputs()))


def is_session(model: Any) -> bool:
    """Whether `model` is a session of ONNX Runtime."""
    return isinstance(model, onnxruntime.InferenceSession)


def its_outputs(session: Any, names: Iterable[str]) -> list[str] | None:
    """These names, if all are outputs of the session; else None: they are other names of all its outputs, in order."""
    wanted = list(names)
    known = [node.name for node in session.get_outputs()] if is_session(session) else []
    return wanted if set(wanted) <= set(known) else None


def run(session: onnxruntime.InferenceSession, data: Any, wanted: Sequence[str] | None = None) -> Any:
    """Run the session: an array for its only output, a list of arrays for several; of `wanted` outputs, if it is given.

    `data` is the only input as an array, a tensor or nested lists; a list or tuple of as many arrays as there are
    inputs; or a dict of them by name. Numbers of another type than the input's are converted.
    """
    inputs = session.get_inputs()
    if isinstance(data, Mapping):
        given: dict[str, Any] = dict(data)
    elif len(inputs) == 1:
        given = {inputs[0].name: data}
    elif isinstance(data, (list, tuple)) and len(data) == len(inputs):
        given = {spec.name: value for spec, value in zip(inputs, data, strict=True)}
    else:
        names = ", ".join(spec.name for spec in inputs)
        raise ValueError(f"The model has the inputs {names}: give a dict of arrays by name, or as many arrays.")
    types = {spec.name: spec.type for spec in inputs}
    feed = {name: _as_input(value, types.get(name, "")) for name, value in given.items()}
    outputs: list[Any] = session.run(wanted, feed)
    return outputs[0] if len(outputs) == 1 else outputs


def _as_input(value: Any, kind: str) -> Any:
    if hasattr(value, "detach"):  # a torch tensor, without torch imported here
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    wanted = _DTYPES.get(kind)
    if wanted is None or array.dtype == wanted:
        return array
    return array.astype(wanted)


def _session_options(settings: Mapping[str, Any], threads: int, inter_threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _whole(settings, "intra_op_num_threads", threads)
    options.inter_op_num_threads = _whole(settings, "inter_op_num_threads", inter_threads)
    if "log_severity_level" in settings:
        options.log_severity_level = _whole(settings, "log_severity_level", 2)
    if "graph_optimization_level" in settings:
        options.graph_optimization_level = _word(settings, "graph_optimization_level", _LEVELS)
    if "execution_mode" in settings:
        options.execution_mode = _word(settings, "execution_mode", _MODES)
    for key in ("enable_mem_pattern", "enable_cpu_mem_arena"):
        if key in settings:
            setattr(options, key, bool(settings[key]))
    for key, value in (settings.get("config_entries") or {}).items():
        options.add_session_config_entry(str(key), str(value))
    return options


def _whole(settings: Mapping[str, Any], key: str, default: int) -> int:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelNotLoadable(f"onnx.{key} of the model's configuration is {value!r}; it must be a whole number >= 0.")
    return value


def _word(settings: Mapping[str, Any], key: str, known: Mapping[str, Any]) -> Any:
    word = str(settings[key]).lower().removeprefix("ort_").removeprefix("enable_").removesuffix("_all")
    if word not in known:
        raise ModelNotLoadable(
            f"onnx.{key} of the model's configuration is {settings[key]!r}; it must be one of {', '.join(known)}."
        )
    return known[word]


@dataclass(frozen=True)
class _Wanted:
    """Which providers must be in use: those of `names`, and with a `gpu_id` one of those that compute on devices."""

    names: tuple[str, ...]
    gpu_id: int | None
    may_fall_back: bool
    context: Any

    @classmethod
    def of(cls, settings: Mapping[str, Any], context: Any) -> _Wanted:
        """What the options say, and the worker's device where they name no provider."""
        fallback = settings.get("fallback", context is not None and not getattr(context, "must_use_device", False))
        if not isinstance(fallback, bool):
            raise ModelNotLoadable(f"onnx.fallback of the model's configuration is {fallback!r}; it must be a boolean.")
        given = settings.get("providers")
        if given is not None:
            names = [_full_name(str(name)) for name in ([given] if isinstance(given, str) else given)]
            return cls(tuple(names), None, fallback, context)
        if context is None or str((context.model_yaml_config or {}).get("deviceType")).lower() == "cpu":
            return cls((), None, fallback, context)
        return cls((), context.system_properties.get("gpu_id"), fallback, context)

    @property
    def is_device(self) -> bool:
        """Whether something beside the CPU is wanted."""
        return self.gpu_id is not None or any(name != _CPU for name in self.names)

    def check(self, there: Sequence[str], why: str) -> bool:
        """Raise ModelNotLoadable, or warn, where what is wanted is not `there`; `why` says what is instead.

        Returns whether it warned.
        """
        missing = [name for name in self.names if name not in there]
        if missing:
            self._complain(f"onnx.providers of the model's configuration names {', '.join(missing)}; {why}")
        elif self.gpu_id is not None and not any(name in _ON_DEVICES for name in there):
            self._complain(
                f"The worker was given device {self.gpu_id}, and ONNX Runtime {onnxruntime.__version__} does not "
                f"compute on it: {why} ({describe_driver()}). The package onnxruntime-gpu (NVIDIA) or "
                "onnxruntime-migraphx (AMD) goes in the place of onnxruntime"
            )
        else:
            return False
        return True

    def _complain(self, sentence: str) -> None:
        if not self.may_fall_back:
            way = "With onnx: {fallback: true}, or deviceType: cpu, the model runs all the same"
            raise ModelNotLoadable(f"{sentence.rstrip('.')}. {way}.")
        note_warning(self.context, sentence)


def _load_libraries() -> None:
    """Have CUDA's and cuDNN's libraries of the packages `nvidia-…`, which torch brings as well, found."""
    load = getattr(onnxruntime, "preload_dlls", None)
    if load is None:
        return
    try:
        load()
    except Exception as error:  # the session says what it could not begin
        logger.warning("CUDA's libraries are not loaded before ONNX Runtime asks for them: %s", error)


def _providers(
    settings: Mapping[str, Any], device: str, wanted: _Wanted, available: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Provider names in order, and an options dict for each."""
    kind, _, number = device.partition(":")
    names = [name for name in wanted.names or _defaults(kind) if name in available]
    given = settings.get("provider_options") or {}
    options: list[dict[str, Any]] = []
    for name in names:
        own = dict(given.get(name) or given.get(name.removesuffix("ExecutionProvider")) or {})
        if kind == "cuda" and number and name in _WITH_DEVICE_ID:
            own.setdefault("device_id", number)
        options.append({str(key): str(value) for key, value in own.items()})
    return names or [_CPU], options or [{}]


def _defaults(kind: str) -> list[str]:
    return [*(_ON_DEVICES if kind == "cuda" else ()), _CPU]


def _full_name(name: str) -> str:
    return name if name.endswith("ExecutionProvider") else f"{name}ExecutionProvider"
