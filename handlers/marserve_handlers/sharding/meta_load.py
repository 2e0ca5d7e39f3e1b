"""Loads an eager model whose weights lie apart from it, in a checkpoint: built without numbers, then filled.

The class is built on torch's meta device, where tensors have a shape and no memory, and each name gets its tensor of
the checkpoint. What no checkpoint holds would stay without numbers: buffers that are not saved, and tensors that are
plain attributes. A class that has such, or that computes with numbers while it is built, is built once more with its
parameters alone on the meta device. What is empty in the end is named, and nothing serves with it.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from marserve_handlers.context import Checkpoint, note_warning
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.runtimes.eager import build_eager
from marserve_handlers.sharding.dcp_reader import TensorReader
from marserve_handlers.sharding.safe_files import find_stored, map_tensors, read_tensors
from marserve_handlers.sharding.tied import find_ties, first_saved, tie
from marserve_handlers.support.devices.device_errors import is_out_of_memory
from marserve_handlers.support.shown import shown_name

_MOST_SHOWN = 3
# What reading files that are not what the server saw may raise.
_DAMAGES = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, pickle.UnpicklingError)


class Described(NamedTuple):
    """A tensor of a checkpoint, by its header; `is_mapped`: it is to be a part of a mapped file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_mapped: bool = False

    @property
    def size(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def load_with_checkpoint(
    model_dir: str, model_file: str, device: Any, checkpoint: Checkpoint, context: Any
) -> torch.nn.Module:
    """The one model class of `model_file` with the weights of the checkpoint, on `device`, for evaluation.

    Notes in the checkpoint how it went, and that it was taken in the context. Raises ModelNotLoadable for weights that
    do not fit, and for numbers that neither the class nor the checkpoint gives.
    """
    model = build_empty(lambda: build_eager(model_dir, model_file))
    name = os.path.basename(os.path.normpath(checkpoint.folder))
    try:
        filled = fill_model(model, checkpoint)
    except ModelNotLoadable as error:
        raise ModelNotLoadable(f"The checkpoint {name} cannot be loaded: {error}") from error.__cause__
    except _DAMAGES as error:
        if is_out_of_memory(error):
            raise
        raise ModelNotLoadable(f"The checkpoint {name} cannot be loaded: {type(error).__name__}: {error}") from error
    model.to(device)
    model.eval()
    checkpoint.size, checkpoint.mapped, checkpoint.seconds = filled.size, filled.mapped, filled.seconds
    context.has_taken_checkpoint = True
    if filled.converted:
        note_warning(
            context,
            f"the checkpoint {name} has {_some(filled.converted)} in another dtype than the model: converted, which "
            "takes memory of each worker that a mapped file does not; save them in the model's dtype",
        )
    return model


# ------------------------------------------------------------------------------------------------------- building


def build_empty(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """The model without the numbers of its parameters; what else it computes while it is built, it has."""
    try:
        with torch.device("meta"):
            model = build()
    except ModelNotLoadable:
        raise
    except Exception:  # it computes with numbers, which the meta device does not have; the second time shows any other
        model = None
    if model is None or lost(model):
        with _parameters_on_meta():
            model = build()
    return model


def empty(model: torch.nn.Module) -> None:
    """Move the parameters of a model that was built with numbers to the meta device; tied ones stay tied."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                without = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), without)


def lost(model: torch.nn.Module) -> list[str]:
    """Names of what has no numbers and is in no state dict, so that no checkpoint gives it any."""
    saved = model.state_dict().keys()
    names = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in saved]
    return names + list(_meta_attributes(model))


def _meta_attributes(model: torch.nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            inner: Iterable[Any] = value.values() if isinstance(value, dict) else [value]
            if isinstance(value, list | tuple):
                inner = value
            if any(isinstance(each, torch.Tensor) and each.is_meta for each in inner):
                yield f"{prefix}.{name}" if prefix else name


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Each parameter loses its numbers as soon as a module has it, so that never more than one takes memory.

    It stays the same object, for a further module may get it, too.
    """
    register = torch.nn.Module.register_parameter

    def register_empty(module: torch.nn.Module, name: str, parameter: Any) -> None:
        register(module, name, parameter)
        if type(parameter) is torch.nn.Parameter and not parameter.is_meta:
            empty = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)  # type: ignore[no-untyped-call]

    torch.nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


# -------------------------------------------------------------------------------------------------------- filling


class Filled(NamedTuple):
    """The bytes that were filled, those of them that are mapped files, and how long it took; converted names."""

    size: int
    mapped: int
    seconds: float
    converted: list[str]


def fill_model(model: torch.nn.Module, checkpoint: Checkpoint) -> Filled:
    """Give each name of the model its tensor of the checkpoint. Raises ModelNotLoadable, and as the readers do."""
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    ties = find_ties(model)
    if checkpoint.layout:
        described, read = _open_dcp(checkpoint.folder, checkpoint.layout, wanted)
    else:
        described, read = _open_safetensors(checkpoint.folder, may_map=checkpoint.may_map)
    began = time.perf_counter()  # not before the reader, and what that imports, is there
    leading = first_saved(ties, described)
    check_names(model, wanted, {name: each.shape for name, each in described.items()}, leading)
    tensors = read([name for name in wanted if name in described])
    for name, leader in leading.items():
        if name in tensors and not torch.equal(tensors[name], tensors[leader]):
            both = f"{shown_name(name)} and {shown_name(leader)}"
            raise ModelNotLoadable(f"{both} are one tensor in the model, and two with other numbers in it")
        tensors.pop(name, None)
    converted = [name for name, tensor in tensors.items() if described[name].dtype != wanted[name].dtype]
    size = sum(described[name].size for name in tensors)
    mapped = sum(described[name].size for name in tensors.keys() - set(converted) if described[name].is_mapped)
    for name in converted:
        tensors[name] = tensors[name].to(wanted[name].dtype)
    model.load_state_dict(tensors, strict=False, assign=True)
    tie(model, leading)
    check_filled(model)
    return Filled(size, mapped, time.perf_counter() - began, converted)


Read = Callable[[Iterable[str]], dict[str, torch.Tensor]]


def _open_safetensors(folder: str, *, may_map: bool) -> tuple[Mapping[str, Described], Read]:
    stored = find_stored(folder)

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        chosen = {name: stored[name] for name in names}
        return map_tensors(chosen) if may_map else read_tensors(chosen)

    described = {}
    for name, each in stored.items():
        described[name] = Described(each.dtype, each.shape, may_map and each.can_be_mapped)
    return described, read


def _open_dcp(folder: str, layout: bytes, wanted: Mapping[str, torch.Tensor]) -> tuple[Mapping[str, Described], Read]:
    reader = TensorReader(folder, layout)

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        state = {name: torch.empty(described[name].shape, dtype=wanted[name].dtype) for name in names}
        reader.fill(state)
        return state

    described = {name: Described(dtype, shape) for name, (dtype, shape) in reader.tensors.items()}
    return described, read


def check_names(
    model: torch.nn.Module,
    wanted: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    leading: Mapping[str, str],
) -> None:
    """Raise ModelNotLoadable unless weights of these shapes have each name of the model in its shape, and no other.

    Of names that are tied one is enough: `leading` has the others.
    """
    missing = [name for name in wanted if name not in shapes and name not in leading]
    extra = sorted(name for name in shapes if name not in wanted)
    misshapen = [
        f"{shown_name(name)} has the shape {list(shapes[name])} in it and {list(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in shapes and shapes[name] != tuple(tensor.shape)
    ]
    if not (missing or extra or misshapen):
        return
    faults = [f"it lacks {_some(missing)}"] if missing else []
    faults += [f"it holds {_some(extra)}, which the model does not have"] if extra else []
    faults += ["; ".join(_first(misshapen))] if misshapen else []
    hint = _hint(missing, extra)
    raise ModelNotLoadable(f"it does not fit {type(model).__name__}: {'; '.join(faults)}{hint}.")


def _hint(missing: list[str], extra: list[str]) -> str:
    """What to do about names that all lie below one more, as in the state of a whole training; empty for others."""
    if missing:
        for name in extra:
            prefix = name.removesuffix(missing[0])
            if prefix.endswith(".") and prefix != name and {f"{prefix}{each}" for each in missing} <= set(extra):
                return f". The names in it begin with {shown_name(prefix)}: save the state dict of that part alone"
    return ""


def check_filled(model: torch.nn.Module) -> None:
    """Raise ModelNotLoadable for what has no numbers: it would give garbage, or fail at the first request."""
    empty = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    empty += [name for name, tensor in model.named_buffers() if tensor.is_meta]
    empty += _meta_attributes(model)
    if empty:
        raise ModelNotLoadable(
            f"neither it nor the class gives numbers to {_some(empty)}; register as buffers what the class computes of "
            "its weights, so that they are saved."
        )


def _some(names: Iterable[str]) -> str:
    return ", ".join(_first([shown_name(name) for name in names]))


def _first(texts: list[str]) -> list[str]:
    """The first few, the last of which says how many more there are."""
    more = len(texts) - _MOST_SHOWN
    return texts if more <= 0 else [*texts[: _MOST_SHOWN - 1], f"{texts[_MOST_SHOWN - 1]} and {more} more"]
