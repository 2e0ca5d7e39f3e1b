"""Torch's side of a handler, whatever the model was saved as: devices, tensors, running, compiling, profiling."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.utils.dlpack

from marserve_handlers.context import note_warning
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.optimising.telemetry_off import switch_telemetry_off
from marserve_handlers.support.devices.compilation import PT2Backend, find_missing_compiler
from marserve_handlers.support.devices.device_errors import is_out_of_memory, words_of_loss
from marserve_handlers.support.devices.devices import choose_device
from marserve_handlers.support.shown import first_line_with_kind

logger = logging.getLogger(__name__)

T = TypeVar("T")


def find_device(gpu_id: int | None, device_type: str | None = None) -> torch.device:
    """The device that a worker with `gpu_id` computes on, see `devices.choose_device`.

    CUDA and XPU are only asked for where there is a gpu id: asking can make a process unfit for forking.
    """
    available = set()
    if gpu_id is not None:
        if torch.cuda.is_available():
            available.add("cuda")
        if torch.xpu.is_available():
            available.add("xpu")
    if torch.backends.mps.is_available():
        available.add("mps")
    return torch.device(str(choose_device(gpu_id, available, device_type)))


def own_device(context: Any, gpu_id: int | None, device_type: str | None = None) -> torch.device:
    """As `find_device`, for a worker whose device must be one that torch can use: a kernel is run there.

    Raises ModelNotLoadable where it cannot be used and `context` says that it must be; else that is a warning of the
    load, and the model computes on the CPU.
    """
    device = find_device(gpu_id, device_type)
    if gpu_id is None or (device_type is not None and device_type.lower() == "cpu"):
        return device
    from marserve_handlers.runtimes.assigned import why_unusable

    reason = why_unusable(gpu_id, None if device.type == "cpu" else device)
    if not reason:
        return device
    if getattr(context, "must_use_device", False):
        raise ModelNotLoadable(reason)
    note_warning(context, f"{reason} The model computes on the CPU")
    return torch.device("cpu")


def as_tensor(rows: Any, device: Any) -> torch.Tensor:
    """A tensor of `rows` on `device`; arrays and tensors that lie there already are not copied."""
    return torch.as_tensor(rows, device=device)


def from_device(array: Any, device: Any) -> torch.Tensor:
    """A tensor of what another library holds on a device, copied there: it writes to its memory again."""
    if hasattr(array, "__dlpack__"):
        shared: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    else:
        shared = torch.as_tensor(array, device=device)
    return shared.to(device, copy=True)


def stack(rows: list[Any], device: Any) -> torch.Tensor:
    """One tensor [B, …] of B arrays, tensors or nested lists of one shape, on `device`, floats as float32."""
    tensors = [row if isinstance(row, torch.Tensor) else torch.as_tensor(row, dtype=torch.float32) for row in rows]
    return torch.stack(tensors).to(device)


def run(model: Any, data: Any, device: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model on `data`, moved to `device`, in inference mode."""
    with torch.inference_mode():
        return model(data.to(device), *args, **kwargs)


def run_on_arrays(model: Any, arrays: list[Any], device: Any, dtypes: list[str]) -> Any:
    """Call the model on numpy arrays, in the order of its arguments, in inference mode."""
    with torch.inference_mode():
        return model(
            *(
                torch.from_numpy(array if array.flags.writeable else array.copy()).to(device, getattr(torch, dtype))
                for array, dtype in zip(arrays, dtypes, strict=True)
            )
        )


def run_on_list(model: Any, data: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model on a list of tensors that lie on its device, in inference mode."""
    with torch.inference_mode():
        return model(data, *args, **kwargs)


def read_tensor(value: bytes | bytearray) -> Any:
    """What `torch.save` wrote, as long as it is tensors and plain data; nothing else is unpickled.

    Raises ValueError for anything else.
    """
    try:
        return torch.load(io.BytesIO(value), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # torch's reader raises what it stumbles over
        raise ValueError("these bytes are no tensor that torch.save wrote") from error


def compile_model(model: T, options: Mapping[str, Any], device_type: str, context: Any) -> T:
    """The model, compiled with `options` for devices of that type, or as it was where that cannot be.

    Compiling happens at a call, the first one or the first with inputs of a new shape. A call that fails is made once
    more with the model as it was. If that succeeds, compiling was at fault, and the model runs eagerly from then on.
    Either way describe's `warnings` say why, by way of `context`.
    """
    missing = find_missing_compiler(options, device_type)
    if missing:
        _runs_eagerly(context, missing)
        return model
    if options.get("backend") == PT2Backend.OPENVINO.value:
        switch_telemetry_off()  # torch imports OpenVINO for it
    try:
        compiled: T = torch.compile(model, **options)  # type: ignore[call-overload]
    except Exception as error:
        _runs_eagerly(context, first_line_with_kind(error))
        return model
    logger.info("The model is compiled with %s", dict(options))
    if isinstance(compiled, torch.nn.Module):
        compiled.forward = _or_eagerly(compiled.forward, model, context)
        return compiled
    call: T = _or_eagerly(compiled, model, context)
    return call


def _or_eagerly(compiled: Any, model: Any, context: Any) -> Any:
    """A call of `compiled`, or of `model` once that alone has succeeded."""
    is_eager = False

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_eager
        if is_eager:
            return model(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            if is_out_of_memory(error) or words_of_loss(error):
                raise
            answer = model(*args, **kwargs)  # raises what the model has against these inputs
            is_eager = True
            _runs_eagerly(context, first_line_with_kind(error))
            return answer

    return call


def _runs_eagerly(context: Any, reason: str) -> None:
    note_warning(context, f"pt2 is not used, the model runs eagerly: {reason}")


def profile(work: Callable[[], T], folder_name: str, options: Mapping[str, Any]) -> tuple[T, Any]:
    """Run `work` under torch's profiler: its result and the profiler.

    `options` go to `torch.profiler.profile`; the defaults write a trace a call into
    `pytorch_profiler/{folder_name}` of the system's temporary folder, for TensorBoard and Perfetto.
    """
    arguments = dict(options)
    if not arguments:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        arguments = {"activities": activities, "record_shapes": True}
    if "on_trace_ready" not in arguments:
        folder = os.path.join(tempfile.gettempdir(), "pytorch_profiler", folder_name)
        arguments["on_trace_ready"] = torch.profiler.tensorboard_trace_handler(folder)
        logger.info("Profiler traces are written to %s", folder)
    with torch.profiler.profile(**arguments) as profiler:
        return work(), profiler


@contextlib.contextmanager
def deprecations_ignored() -> Iterator[None]:
    """Keeps torch's advice to move on from TorchScript out of the log: the archive is what it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
