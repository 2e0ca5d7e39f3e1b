"""Sees what a model is called with by the first batches, and has that counted beside what is served.

After `BATCHES` of them a thread counts. The next call sends the outcome and ends the watch: from then on the model is
called as if there had been none.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from marserve_handlers.context import Context
from marserve_handlers.flops.cost import Cost, NotCounted, fit
from marserve_handlers.flops.peak import cached_peak
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.optimising.capture import Capture, find_model
from marserve_handlers.support.comparing.held_models import is_session

BATCHES = 8
MOST_CALLS = 64  # of a model by these batches
NOT_COUNTED = "FLOPs are not counted"


class Outcome(NamedTuple):
    """What was counted: FLOPs a batch and a request, of inputs like `inputs`, and the peak for `dtype` a second."""

    cost: Cost
    peak: float
    dtype: str
    inputs: str


# A protocol: modules and graphs have no code in common.
class Counter(Protocol):
    """What counts one model."""

    dtype: str
    uncounted: set[str]

    def count(self, call: Call, rows: int) -> int:
        """FLOPs of a call with so many rows."""


class _Batch:
    def __init__(self, items: Sequence[Any]) -> None:
        self.items: Sequence[Any] | None = items
        self.requests = max(1, len(items))
        self.calls: list[Call] = []


class Watch(Capture):
    """Hooks a model. `tell` gets the outcome, in the thread that calls the model; a failure goes to the context."""

    def __init__(
        self, model: Any, context: Context, make: Callable[[], Counter], peaks: dict[str, float], device: str
    ) -> None:
        super().__init__(model)
        self.tell: Callable[[Outcome], None] = lambda outcome: None
        self._context = context
        self._make = make
        self._peaks = peaks
        self._device = device
        self._batches: list[_Batch] = []
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._is_over = False

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # an author's own thread: nobody knows for which batch
        if self._is_over:
            self._close()
            if self._outcome is not None:
                self.tell(self._outcome)
            return
        if self._thread is not None:
            return
        items = self._context.batch_items
        batches = self._batches
        if not batches or batches[-1].items is not items:
            if len(batches) >= BATCHES:
                self._begin()
                return
            batches.append(_Batch(items))
        call = Call(args, kwargs)
        batches[-1].calls.append(call.replaced({name: _without_numbers(leaf) for name, leaf in call.leaves.items()}))
        if sum(len(batch.calls) for batch in batches) >= MOST_CALLS:
            if len(batches) > 1:
                batches.pop()  # more calls of it may follow
            self._begin()

    def _begin(self) -> None:
        for batch in self._batches:
            batch.items = None  # they are clients'
        self._thread = threading.Thread(target=self._count, name="flops", daemon=True)
        self._thread.start()

    def _count(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread alone
        try:
            self._outcome = self.outcome()
        except NotCounted as error:
            self._context.load_warnings.append(f"{NOT_COUNTED}: {error}")
        except Exception as error:  # of a library's
            self._context.load_warnings.append(f"{NOT_COUNTED}: {type(error).__name__}: {str(error)[:300]}")
        self._batches = []
        self._is_over = True

    def outcome(self) -> Outcome:
        """Count what was seen. Raises NotCounted."""
        batches = self._batches
        if len(batches) == 1 and len(batches[0].calls) >= MOST_CALLS:
            raise NotCounted(f"one batch called the model {MOST_CALLS} times and more")
        counter = self._make()
        cost = _cost_of(counter, batches)
        if not cost.of(1):
            raise NotCounted(f"none of its operators is known{_named(counter.uncounted)}")
        if counter.uncounted:
            self._context.load_warnings.append(f"FLOPs are counted without{_named(counter.uncounted)[1:]}")
        given = self._peaks.get(counter.dtype, self._peaks.get(""))
        peak = given or cached_peak(counter.dtype, self._context.threads, self._device)
        kinds = {call.shapes for batch in batches for call in batch.calls}
        said = _said(batches[0].calls[0])
        return Outcome(cost, peak, counter.dtype, said if len(kinds) == 1 else f"{said} and others, the mean of them")


def _without_numbers(leaf: Any) -> Any:
    """A leaf of the same shape and dtype that takes no memory."""
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
    return leaf.detach().new_empty(tuple(leaf.shape), device="meta")


def _cost_of(counter: Counter, batches: Sequence[_Batch]) -> Cost:
    """A line where each batch was one call of as many rows as requests, all of one shape; else the mean a request."""
    calls = [call for batch in batches for call in batch.calls]
    is_plain = all(len(batch.calls) == 1 and batch.calls[0].rows == batch.requests for batch in batches)
    if is_plain and len({call.shapes for call in calls}) == 1:
        return fit(lambda rows: counter.count(calls[0], rows), calls[0].rows)
    known: dict[Any, int] = {}
    total = 0
    for call in calls:
        kind = call.shapes, call.rows, tuple(leaf.shape for leaf in call.leaves.values())
        if kind not in known:
            known[kind] = counter.count(call, call.rows)
        total += known[kind]
    return Cost(0.0, total / sum(batch.requests for batch in batches))


def _named(names: set[str]) -> str:
    return f": {', '.join(sorted(names)[:8])}" if names else ""


def _said(call: Call) -> str:
    """Its inputs in words: `x float32 [n, 3, 224, 224]`."""
    rows = call.rows
    words = []
    for name, leaf in list(call.leaves.items())[:4]:
        shape = ["n" if at == 0 and rows else str(length) for at, length in enumerate(leaf.shape)]
        name = f"argument {int(name) + 1}" if name.isdigit() else name
        words.append(f"{name} {str(leaf.dtype).removeprefix('torch.')} [{', '.join(shape)}]")
    return ", ".join(words)


def open_watch(handle: Any, context: Context, peaks: dict[str, float], *, is_concurrent: bool = False) -> Watch | None:
    """Begin to watch the model of a handler that is loaded. None, with a sentence in describe, where that cannot be."""
    reason = ""
    found = find_model(handle)
    if is_concurrent:
        reason = "with asyncCommunication nobody knows which request a call of the model is for"
    elif context.build:
        reason = f"the build {context.build} serves, and the model that it was made of is not there"
    elif found.model is None:
        reason = found.why_not
    if reason:
        context.load_warnings.append(f"{NOT_COUNTED}: {reason}")
        return None
    model = found.model
    path = str(getattr(getattr(handle, "__self__", None), "model_pt_path", None) or "")
    if is_session(model):
        path = path if path.endswith(".onnx") else str(getattr(model, "_model_path", None) or "")
        device = "cpu"
        if any("CPU" not in provider for provider in model.get_providers()[:1]):
            device = "other"
    else:
        first = next(iter(model.parameters()), None)
        device = "cpu" if first is None else str(first.device)

    def make() -> Counter:
        if is_session(model):
            from marserve_handlers.flops.graphs import CountedGraph  # here: it may need a package that is not there

            return CountedGraph(path)
        from marserve_handlers.flops.modules import CountedModule  # here: torch is loaded already

        return CountedModule(model, path)

    watch = Watch(model, context, make, peaks, device)
    try:
        watch.__enter__()
    except Exception as error:  # a model that takes no hooks
        context.load_warnings.append(f"{NOT_COUNTED}: the model takes no hooks ({type(error).__name__})")
        return None
    return watch


__all__ = ["Outcome", "Watch", "open_watch"]
