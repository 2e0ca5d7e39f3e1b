"""Samples, answered by the ranks and by the whole model on one.

What reaches the divided model while samples pass the handler is kept on rank 0, with what the model gave. The whole
model, on the host and upon the mapped file, is then called with the same. A plan that divides heads in the middle, or
has its pairs in the wrong order, shows here and not in answers to clients.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.optimising.call_arrays import Call, as_numpy, leaves_of

# A larger error, as a share of the output's largest number, is refused: by the precision of the weights.
BOUNDS = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
# So many calls of the model for one sample are compared: a generator makes hundreds.
MOST_CALLS = 4


class OneRank:
    """Keeps what samples come to on the ranks, and compares it with what one rank gives."""

    def __init__(self, model: nn.Module, whole: Callable[[], nn.Module], *, ranks: int, rank: int) -> None:
        self._model = model
        self._whole = whole
        self.ranks = ranks
        self._is_first = rank == 0
        self._kept: list[_Kept] = []

    def run(self, sample: int, answer: Callable[[], object]) -> str:
        """Have the ranks answer a sample; why it was not answered, or an empty text. All ranks do this alike."""
        first = len(self._kept)

        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._is_first and len(self._kept) - first < MOST_CALLS:
                # Copied whole: a cache among them is written to by the call.
                self._kept.append(_Kept(sample, Call(copy.deepcopy(args), copy.deepcopy(kwargs))))

        def after(module: Any, args: Any, output: Any) -> None:
            if len(self._kept) > first and self._kept[-1].output is None:
                self._kept[-1].output = {name: as_numpy(leaf) for name, leaf in leaves_of(output).items()}

        hooks = [
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after),
        ]
        try:
            answer()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            if len(self._kept) > first and self._kept[-1].output is None:
                self._kept[-1].error = why
            return why
        finally:
            for hook in hooks:
                hook.remove()
        return ""

    def compare(self) -> int:
        """How many calls were compared. Raises ModelNotLoadable where one rank gives something else.

        Random numbers go on as on the other ranks, which build and call nothing here.
        """
        if not self._kept:
            return 0
        drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
        try:
            with torch.random.fork_rng(devices=[]):
                whole = self._whole()
                kept, self._kept = self._kept, []
                return sum(self._compare_one(whole, each) for each in kept)
        finally:
            random.setstate(drawn)
            np.random.set_state(drawn_by_numpy)

    def _compare_one(self, whole: nn.Module, kept: _Kept) -> bool:
        call = kept.call.replaced({name: _on_host(leaf) for name, leaf in kept.call.leaves.items()})
        try:
            with torch.inference_mode():
                wanted = {name: as_numpy(leaf) for name, leaf in leaves_of(whole(*call.args, **call.kwargs)).items()}
        except Exception:
            if kept.output is None:
                return False  # one rank does not answer it either: it is the sample's fault, or tried another way
            raise
        which, seen = f"sample {kept.sample}", kept.output
        if seen is None:
            why = kept.error or "an error, which the handler catches"
            raise _differ(f"one rank answers {which}, and {self.ranks} ranks raise {why}")
        if seen.keys() != wanted.keys():
            raise _differ(f"{which} has the outputs {', '.join(seen)}, on one rank {', '.join(wanted)}")
        bound = _bound_of(whole)
        for name, array in wanted.items():
            what = f"{name} of {which}" if name != "output" else which
            if seen[name].shape != array.shape:
                shapes = f"{list(seen[name].shape)} on {self.ranks} ranks and {list(array.shape)} on one"
                raise _differ(f"{what} is {shapes}")
            error = error_of(seen[name], array)
            if not error <= bound:
                off = f"off by {error:.2g} of its largest number on {self.ranks} ranks"
                raise _differ(f"{what} is {off}, and {bound:g} is allowed")
        return True


class _Kept:
    """A call of the model: what went in, what the ranks gave, or why they gave nothing."""

    def __init__(self, sample: int, call: Call) -> None:
        self.sample = sample
        self.call = call
        self.output: dict[str, np.ndarray[Any, Any]] | None = None
        self.error = ""


def error_of(seen: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """The largest difference, as a share of the largest number that is wanted; NaN where one alone is none."""
    if not wanted.size:
        return 0.0
    ours, theirs = seen.astype(np.float64), wanted.astype(np.float64)
    is_alike = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    if is_alike.all():
        return 0.0
    off = np.abs(ours - theirs)[~is_alike].max()
    scale = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
    return float(off / scale) if scale else float(off)


def _bound_of(model: nn.Module) -> float:
    names = {str(parameter.dtype).rpartition(".")[2] for parameter in model.parameters()}
    return max((BOUNDS.get(name, 0.0) for name in names), default=0.0) or BOUNDS["float32"]


def _on_host(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _differ(what: str) -> ModelNotLoadable:
    return ModelNotLoadable(
        f"parallel: {what.rstrip('.')}. Look at its plan: what reads a colwise module must be rowwise, and the heads "
        "of an attention must divide by the ranks. A module that is left out of the plan stays whole."
    )
