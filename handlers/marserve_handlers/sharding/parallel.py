"""Divides an eager model over the ranks of a worker, as `parallel` says, by torch's `parallelize_module`.

The model is built without its weights, and the plan is held against its modules, before a rank looks for the others or
reads a number: a plan that does not fit costs no load. Then each rank reads the parts that are its own from the
archive's weights, which are mapped, so that a rank has its share in memory and never the whole.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from marserve_handlers.context import Checkpoint, note_warning
from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.runtimes.eager import build_eager, preferred_weights, read_state, saying_what_is_wrong
from marserve_handlers.sharding import meta_load
from marserve_handlers.sharding.checkpoint_weights import CheckpointWeights
from marserve_handlers.sharding.mesh import join_mesh
from marserve_handlers.sharding.one_rank import OneRank
from marserve_handlers.sharding.plan import EMBEDDING, LINEAR, BadPlan, Division, Module, divide
from marserve_handlers.sharding.safe_files import stored_in
from marserve_handlers.sharding.stored import read_part
from marserve_handlers.sharding.tied import find_ties, first_saved
from marserve_handlers.support.shown import shown_name

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """Where weights are read from, part by part."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all of them, by name."""

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of one of them, in memory of its own."""


class HeldWeights:
    """Weights that are there as tensors; those of a file are mapped."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all of them, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._state.items()}

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of one of them, in memory of its own."""
        return self._state[name].detach()[part].clone(memory_format=torch.contiguous_format)


class StoredWeights:
    """Weights in a `.safetensors` file, of which only the parts that are asked for are read."""

    def __init__(self, path: str) -> None:
        self._stored = stored_in(path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of all of them, by name."""
        return {name: each.shape for name, each in self._stored.items()}

    def read(self, name: str, part: tuple[slice, ...]) -> torch.Tensor:
        """A part of one of them, in memory of its own."""
        return read_part(self._stored[name], name, part)


def load_parallel(
    model_dir: str, model_file: str, weights: str | None, device: torch.device, context: Any
) -> nn.Module:
    """This rank's part of the model of `model_file`, on `device`, for evaluation.

    `context.parallel` has the mesh and the plan; `context.one_rank` is set, by which samples are compared. `weights` is
    a path as for `load_eager`; None leaves the class's own numbers, which are drawn alike on every rank. The weights of
    `context.checkpoint` come before both. Raises ModelNotLoadable for a plan that does not fit the model, and for
    weights that do not.
    """
    sizes, plan = context.parallel
    checkpoint = getattr(context, "checkpoint", None)
    path = None if weights is None else preferred_weights(weights)
    if checkpoint is not None:
        path = os.path.normpath(checkpoint.folder)
    model, own = open_model(model_dir, model_file, keeps_numbers=path is None)
    division = check_plan(model, plan, sizes)
    for remark in division.remarks:
        note_warning(context, remark)
    with contextlib.nullcontext() if path is None else saying_what_is_wrong(path):
        source: Weights = HeldWeights(own)
        if path is not None:
            source = open_weights(path) if checkpoint is None else CheckpointWeights(checkpoint)
        names = places_of(model, source.shapes())
    mesh = join_mesh(sizes, device)
    with contextlib.nullcontext() if path is None else saying_what_is_wrong(path):
        check_ties(model, source, mesh.get_local_rank(), mesh.size())
    parallelize_module(model, mesh, torch_styles(model, division), src_data_rank=None)
    for name in division.styles:
        module = model.get_submodule(name)
        module.forward = _outside_inference_mode(module.forward)
    with contextlib.nullcontext() if path is None else saying_what_is_wrong(path):
        began = time.perf_counter()
        fill(model, source, names, device)
    seconds = time.perf_counter() - began
    if checkpoint is not None and isinstance(source, CheckpointWeights):
        checkpoint.size, checkpoint.seconds = source.bytes_read, seconds
        context.has_taken_checkpoint = True
    else:
        context.share = Checkpoint(model_dir, size=bytes_of(model), seconds=seconds)

    def whole() -> nn.Module:
        if checkpoint is not None:
            return build_whole(model_dir, model_file, CheckpointWeights(checkpoint).read_all())
        return build_whole(model_dir, model_file, own if path is None else read_all(path))

    context.one_rank = OneRank(model, whole, ranks=mesh.size(), rank=mesh.get_local_rank())
    return model.eval()


# ------------------------------------------------------------------------------------------- a model without numbers


def open_model(
    model_dir: str, model_file: str, *, keeps_numbers: bool = False
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model with its parameters on the meta device and its buffers as its class computes them.

    The second value is what its class gave as numbers, with `keeps_numbers`, else empty. A class that needs the numbers
    of its parameters while it builds itself gets them, and the whole model is in memory for that time.
    """

    def build() -> nn.Module:
        return build_eager(model_dir, model_file)

    if not keeps_numbers:
        try:
            model = meta_load.build_empty(build)
            if not meta_load.lost(model):
                return model, {}
        except ModelNotLoadable:
            raise
        except Exception as error:  # torch's, for numbers that are not there; or the author's, which is raised below
            logger.debug("%s is built with its numbers: %s", model_file, error)
    model = build()
    numbers = dict(model.state_dict()) if keeps_numbers else {}
    meta_load.empty(model)
    return model, numbers


def check_plan(model: nn.Module, plan: Mapping[str, str], sizes: Mapping[str, int]) -> Division:
    """What the plan does to the model. Raises ModelNotLoadable with all that is wrong with it."""
    try:
        return divide(list(modules_of(model)), plan, sizes["tp"])
    except BadPlan as error:
        raise ModelNotLoadable(f"The plan of parallel does not fit the model: {str(error).rstrip('.')}.") from None


def modules_of(model: nn.Module) -> Iterator[Module]:
    """What a plan needs to know of a model's modules."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Linear):
            kind = LINEAR
        elif isinstance(module, nn.Embedding):
            kind = EMBEDDING
        own = dict(module.named_parameters(recurse=False))
        size = max((parameter.itemsize for parameter in own.values()), default=4)
        yield Module(name, kind, {key: tuple(parameter.shape) for key, parameter in own.items()}, size)


def torch_styles(model: nn.Module, division: Division) -> dict[str, ParallelStyle]:
    """The styles as torch's objects, by the whole names of modules."""
    styles: dict[str, ParallelStyle] = {}
    for name, style in division.styles.items():
        if style == "colwise":
            styles[name] = ColwiseParallel()
        elif style == "colwise_rep":
            styles[name] = ColwiseParallel(output_layouts=Replicate())
        elif style == "rowwise_rep" or isinstance(model.get_submodule(name), nn.Embedding):
            styles[name] = RowwiseParallel(input_layouts=Replicate())  # numbers of rows are not divided
        else:
            styles[name] = RowwiseParallel()
    return styles


def _outside_inference_mode(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same without gradients, but not in inference mode.

    In that mode torch (2.13) takes a linear layer with a bias as one operation if its input is a matrix, finds no way
    to add up parts in it, and gathers the whole weight on every rank at each call.
    """

    @functools.wraps(forward)
    def compute(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return forward(*args, **kwargs)

    return compute


# ------------------------------------------------------------------------------------------- its numbers


def open_weights(path: str) -> Weights:
    """The weights in the file of that path. Raises what their readers raise."""
    return StoredWeights(path) if path.endswith(".safetensors") else HeldWeights(read_all(path))


def read_all(path: str) -> dict[str, torch.Tensor]:
    """All weights of a file, mapped. Raises what their readers raise."""
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path, device="cpu")
    state: Any = read_state(path)
    found = state.items() if isinstance(state, Mapping) else [("it", state)]
    odd = [
        f"{shown_name(str(name))} is of type {type(value).__name__}"
        for name, value in found
        if not isinstance(value, torch.Tensor)
    ]
    if odd or not isinstance(state, Mapping):
        what = odd[0] if odd else "it is of type Tensor"
        raise ValueError(f"they are no state dict, for {what}: save what model.state_dict() gives")
    return dict(state)


def places_of(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """For each parameter and kept buffer the name under which the weights have its numbers: its own, or a tied one's.

    Raises ModelNotLoadable for missing and superfluous names, and for other shapes.
    """
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    leading = first_saved(find_ties(model), shapes)
    meta_load.check_names(model, wanted, shapes, leading)
    return {name: leading.get(name, name) for name in wanted}


def check_ties(model: nn.Module, source: Weights, rank: int, ranks: int) -> None:
    """Raise ModelNotLoadable where what is one tensor in the model is two with other numbers in the weights.

    Each rank compares its share of the rows.
    """
    shapes = source.shapes()
    for names in find_ties(model):
        leader, *others = [name for name in names if name in shapes] or [""]
        for name in others:
            shape = shapes[name]
            length = shape[0] if shape else 1
            rows = slice(length * rank // ranks, length * (rank + 1) // ranks)
            part = (rows, *(slice(0, each) for each in shape[1:])) if shape else ()
            if not torch.equal(source.read(name, part), source.read(leader, part)):
                raise ModelNotLoadable(
                    f"{name} and {leader} are one tensor in the model, and two with other numbers in its weights"
                )


def fill(model: nn.Module, source: Weights, places: Mapping[str, str], device: torch.device) -> None:
    """Read this rank's part of each parameter, and each buffer, to the device."""
    whole: dict[int, nn.Parameter] = {}  # tied ones that are not divided stay one
    for name, place in places.items():
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        if leaf not in module._parameters:
            buffer = module._buffers[leaf]
            assert buffer is not None
            module._buffers[leaf] = source.read(place, _all_of(buffer)).to(device, buffer.dtype)
            continue
        parameter = module._parameters[leaf]
        assert parameter is not None
        if isinstance(parameter, DTensor):
            module._parameters[leaf] = _own_part(parameter, source, place, device)
            continue
        if id(parameter) not in whole:
            tensor = source.read(place, _all_of(parameter)).to(device, parameter.dtype)
            whole[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        module._parameters[leaf] = whole[id(parameter)]
    for module in model.modules():
        for leaf, kept in module._buffers.items():
            if kept is not None:
                module._buffers[leaf] = kept.to(device)


def bytes_of(model: nn.Module) -> int:
    """The bytes of the parameters and buffers that this rank holds; tied ones once."""
    held = [*model.parameters(), *model.buffers()]
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in held)


def _own_part(parameter: Any, source: Weights, place: str, device: torch.device) -> nn.Parameter:
    mesh, placements = parameter.device_mesh, parameter.placements
    part = list(_all_of(parameter))
    if isinstance(placements[0], Shard):
        dim = placements[0].dim
        length = parameter.shape[dim] // mesh.size()  # even: the plan was judged
        first = length * mesh.get_local_rank()
        part[dim] = slice(first, first + length)
    local = source.read(place, tuple(part)).to(device, parameter.dtype)
    # Without a check: that would have the ranks speak of every tensor.
    divided = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(divided, requires_grad=parameter.requires_grad)


def _all_of(tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, length) for length in tensor.shape)


def build_whole(model_dir: str, model_file: str, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """The whole model on the host, upon these numbers, which are not copied where they have the model's precision."""
    model, _ = open_model(model_dir, model_file)
    places = places_of(model, HeldWeights(state).shapes())
    for name, place in places.items():
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        if leaf in module._parameters:
            parameter = module._parameters[leaf]
            assert parameter is not None
            module._parameters[leaf] = nn.Parameter(state[place].to(parameter.dtype), requires_grad=False)
        else:
            buffer = module._buffers[leaf]
            assert buffer is not None
            module._buffers[leaf] = state[place].to(buffer.dtype)
    return model.eval()
