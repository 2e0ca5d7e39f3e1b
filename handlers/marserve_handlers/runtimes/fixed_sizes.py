"""Fixed sizes (`allowedBatchSizes`): a model is only called with these numbers of rows.

Kernels that are chosen, compiled or recorded for a size are then few. A batch is filled up to the next size with copies
of its last row, which no model can stumble over as over zeros (an embedding of none, a length of 0), and the copies'
answers are cut off. More rows than the largest size go in several calls.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from marserve_handlers.declared.stacking import next_size
from marserve_handlers.optimising.call_arrays import Call, join, leaves_of, with_leaves
from marserve_handlers.support.comparing.held_models import is_session


def with_fixed_sizes(model: Any, sizes: Sequence[int], context: Any) -> Any:
    """The model, called with these numbers of rows alone; the same object where that can be.

    Calls whose inputs share no batch axis stay as they are. A time line shows `padded 3 to 4` around a call that was
    filled up.
    """
    if is_session(model):
        run = model.run

        def run_padded(names: Any, feed: dict[str, Any], *rest: Any, **named: Any) -> Any:
            return _call(lambda _, kwargs: run(names, kwargs, *rest, **named), Call((), feed), sizes, context)

        model.run = run_padded
        return model
    torch = sys.modules["torch"]
    if not isinstance(model, torch.nn.Module):  # a package that was compiled ahead of time
        return _padding(lambda *args, **kwargs: model(*args, **kwargs), sizes, context)
    if isinstance(model, torch.jit.ScriptModule):
        return _around(model, sizes, context)
    model.forward = _padding(model.forward, sizes, context)
    return model


def without_fixed_sizes(model: Any) -> Any:
    """The module as it was before `with_fixed_sizes`: another one, or a copy that shares its weights."""
    own = getattr(getattr(model, "__dict__", {}).get("forward"), "unpadded", None)
    if own is None:
        return model
    if isinstance(own, sys.modules["torch"].nn.Module):
        return own
    plain = copy.copy(model)
    if getattr(own, "__self__", None) is model:
        vars(plain).pop("forward", None)  # the class has it; a copy of an exported program has left it out
    else:
        vars(plain)["forward"] = own
    return plain


def allow_graphs(sizes: Sequence[int]) -> None:
    """Have inductor record CUDA graphs (HIP graphs) of these sizes alone, where this torch can."""
    with contextlib.suppress(ImportError, AttributeError):
        from torch._inductor import config  # here: only devices record graphs

        triton: Any = config.triton
        if hasattr(triton, "cudagraph_capture_sizes"):
            triton.cudagraph_capture_sizes = tuple(sizes)


def _padding(forward: Callable[..., Any], sizes: Sequence[int], context: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return _call(lambda own, named: forward(*own, **named), Call(args, kwargs), sizes, context)

    vars(call)["unpadded"] = forward
    return call


def _around(script: Any, sizes: Sequence[int], context: Any) -> Any:
    """A module around TorchScript, whose own `forward` cannot be replaced."""
    torch = sys.modules["torch"]

    class Padded(torch.nn.Module):  # type: ignore[misc,name-defined]
        """Has the attributes of what it is around."""

        def __init__(self) -> None:
            super().__init__()
            self.script = script
            self.forward = _padding(script, sizes, context)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("script"), name)

    return Padded()


def _call(run: Callable[[tuple[Any, ...], dict[str, Any]], Any], call: Call, sizes: Sequence[int], context: Any) -> Any:
    rows, most = call.rows, sizes[-1]
    if not rows or rows in sizes:
        return run(call.args, dict(call.kwargs))
    if rows <= most:
        return _run_filled(run, call, rows, next_size(rows, sizes), context)
    parts = []
    for begin in range(0, rows, most):
        leaves = {name: leaf[begin : begin + most] for name, leaf in call.leaves.items()}
        parts.append(_call(run, call.replaced(leaves), sizes, context))
    return _joined(parts)


def _run_filled(run: Callable[..., Any], call: Call, rows: int, size: int, context: Any) -> Any:
    last = call.replaced({name: leaf[-1:] for name, leaf in call.leaves.items()})
    filled = join([call, *[last] * (size - rows)])
    span = getattr(context, "span", None)
    with contextlib.nullcontext() if span is None else span(f"padded {rows} to {size}"):
        output = run(filled.args, dict(filled.kwargs))
    leaves = leaves_of(output)
    cut = {name: leaf[:rows] if len(leaf.shape) and leaf.shape[0] == size else leaf for name, leaf in leaves.items()}
    return with_leaves(output, cut)


def _joined(parts: Sequence[Any]) -> Any:
    """The outputs of several calls as of one."""
    leaves = [leaves_of(part) for part in parts]
    whole = {}
    for name, first in leaves[0].items():
        pieces = [each[name] for each in leaves]
        if not len(first.shape):
            whole[name] = first
            continue
        whole[name] = np.concatenate(pieces) if isinstance(first, np.ndarray) else sys.modules["torch"].cat(pieces)
    return with_leaves(parts[0], whole)
