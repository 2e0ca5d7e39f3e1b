"""Counts what a module of torch takes, on the device `meta`, which has shapes and no numbers.

Nothing is computed, and no memory is taken for weights. On the CPU attention and LSTM would count as nothing; here all
matrix products and convolutions are seen. Quantised and compiled operators are not: count the model that they were made
of. `FlopCounterMode` is torch's own (torch.utils.flop_counter, since 2.1).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from marserve_handlers.flops.cost import NotCounted
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.optimising.capture import Capture
from marserve_handlers.runtimes.fixed_sizes import without_fixed_sizes
from marserve_handlers.support.shown import first_line_with_kind

# Namespaces of operators that are counted, or take next to nothing; what others do is not known.
_KNOWN = frozenset(("aten", "prim", "prims", "profiler", "inductor"))

_HOOKS_OF_WEIGHTS = (
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)


class _Foreign(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators that are not torch's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _KNOWN:
            self.names.add(f"{func.namespace}::{func._schema.name.partition('::')[2]}")
        return func(*args, **(kwargs or {}))


class CountedModule:
    """A module on `meta`, or the TorchScript model of the file `path`. Raises NotCounted where it cannot be there."""

    def __init__(self, model: Any, path: str = "") -> None:
        model = without_fixed_sizes(getattr(model, "_orig_mod", model))  # the first is torch.compile's
        self.uncounted: set[str] = set()
        try:
            if model is None or isinstance(model, torch.jit.ScriptModule):
                if not path.endswith(".pt"):
                    raise NotCounted("its TorchScript was not loaded from the archive's file")
                self._model = torch.jit.load(path, map_location="meta")  # type: ignore[no-untyped-call]
            else:
                self._model = on_meta(model)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, OSError) as error:
            raise NotCounted(
                f"the model cannot be copied to torch's device meta ({first_line_with_kind(error)})"
            ) from None
        self.dtype = _dtype_of(self._model)

    def count(self, call: Call, rows: int) -> int:
        """FLOPs of the same call with so many rows. Raises NotCounted where the model cannot be run without numbers."""
        now = call.rows
        leaves = {name: _resized(leaf, now, rows) for name, leaf in call.leaves.items()}
        resized = call.replaced(leaves)
        foreign = _Foreign()
        try:
            with torch.no_grad(), FlopCounterMode(display=False) as counter, foreign:
                self._model(*resized.args, **resized.kwargs)
        except Exception as error:  # the author's forward raises what it likes
            raise NotCounted(f"the model does not run on torch's device meta ({first_line_with_kind(error)})") from None
        self.uncounted |= foreign.names
        return int(counter.get_total_flops())


def _resized(leaf: Any, now: int, rows: int) -> Any:
    shape = tuple(leaf.shape)
    if now and shape and shape[0] == now:
        shape = (rows, *shape[1:])
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def on_meta(model: Any) -> Any:
    """A copy whose tensors are all on `meta`: `copy` finds these as already copied."""
    done: dict[int, Any] = {}
    for module in model.modules():
        held = [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]
        for each in held:
            if isinstance(each, torch.nn.Parameter):
                done[id(each)] = torch.nn.Parameter(each.detach().to("meta"), requires_grad=False)
            elif isinstance(each, torch.Tensor):
                done[id(each)] = each.detach().to("meta")
    return copy.deepcopy(model, done)


def packable_copy(model: Any) -> Any:
    """A copy on `meta` that another process can be given. Raises NotCounted where there cannot be one.

    Weights that are computed anew at each call (`torch.nn.utils.parametrizations`) become plain ones, since their
    classes have no module; what computes them takes next to nothing. Left out are hooks that only loading and saving
    call, which torch makes inside functions, and that of whoever watches the model.
    """
    model = without_fixed_sizes(getattr(model, "_orig_mod", model))  # the first is torch.compile's
    try:
        copied = on_meta(model)
        for module in list(copied.modules()):
            for hooks in _HOOKS_OF_WEIGHTS:
                getattr(module, hooks, {}).clear()
            for name in list(getattr(module, "parametrizations", None) or ()):
                torch.nn.utils.parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError) as error:
        raise NotCounted(f"the model cannot be copied to torch's device meta ({first_line_with_kind(error)})") from None
    for number, hook in list(copied._forward_pre_hooks.items()):
        if getattr(hook, "__module__", "") == Capture.__module__:
            del copied._forward_pre_hooks[number]
            copied._forward_pre_hooks_with_kwargs.pop(number, None)
    return copied


def _dtype_of(model: Any) -> str:
    """The word for the dtype of its weights: `float32` where it has none that float."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return str(parameter.dtype).removeprefix("torch.")
    return "float32"
