"""Sees what a model is called with by the first batches, and has that counted beside what is served.

After `BATCHES` of them a thread counts. The next call sends the outcome and ends the watch: from then on the model is
called as if there had been none.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
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
MOST_NAMED = 8
MOST_OF_REASON = 400  # characters
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


class Counted(NamedTuple):
    """What the model takes, for weights of `dtype` and inputs like `inputs`, and the operators that were left out."""

    cost: Cost
    dtype: str
    inputs: str
    uncounted: Sequence[str] = ()


class Seen:
    """A batch of so many requests: what the model was called with."""

    def __init__(self, requests: int, calls: Sequence[Call] = (), items: Sequence[Any] | None = None) -> None:
        self.requests = max(1, requests)
        self.calls = list(calls)
        self.items = items


class Watch(Capture):
    """Hooks a model. `tell` gets the outcome, in the thread that calls the model; a failure goes to the context."""

    def __init__(
        self,
        model: Any,
        context: Context,
        make: Callable[[], Counter],
        peaks: dict[str, float],
        device: str,
        known: Counted | None = None,
    ) -> None:
        """`known` was counted before, so that only the peak is missing."""
        super().__init__(model)
        self._known = known
        self.tell: Callable[[Outcome], None] = lambda outcome: None
        self._context = context
        self._make = make
        self._peaks = peaks
        self._device = device
        self._batches: list[Seen] = []
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
        try:
            self._see(args, kwargs)
        except Exception as error:  # odd arguments must not fail the request
            self._fail(f"what the model is called with cannot be looked at ({type(error).__name__}: {error})")
            self._close()

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._known is not None:
            self._begin()
            return
        items = self._context.batch_items
        batches = self._batches
        if not batches or batches[-1].items is not items:
            if len(batches) >= BATCHES:
                self._begin()
                return
            batches.append(Seen(len(items), items=items))
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
            self._fail(str(error))
        except Exception as error:  # of a library's
            self._fail(f"{type(error).__name__}: {error}")
        self._batches = []
        self._is_over = True

    def _fail(self, why: str) -> None:
        self._context.load_warnings.append(f"{NOT_COUNTED}: {why[:MOST_OF_REASON]}")

    def outcome(self) -> Outcome:
        """Count what was seen. Raises NotCounted."""
        counted = self._known
        if counted is None:
            batches = self._batches
            if len(batches) == 1 and len(batches[0].calls) >= MOST_CALLS:
                raise NotCounted(f"one batch called the model {MOST_CALLS} times and more")
            counted = count(self._make(), batches)
        if counted.uncounted:
            self._context.load_warnings.append(f"FLOPs are counted without {', '.join(counted.uncounted)}")
        given = self._peaks.get(counted.dtype, self._peaks.get(""))
        peak = given or cached_peak(counted.dtype, self._context.threads, self._device)
        return Outcome(counted.cost, peak, counted.dtype, counted.inputs)


def count(counter: Counter, batches: Sequence[Seen]) -> Counted:
    """What batches took that were seen. Raises NotCounted."""
    cost = _cost_of(counter, batches)
    uncounted = sorted(counter.uncounted)[:MOST_NAMED]
    if not cost.of(1):
        raise NotCounted(f"none of its operators is known{': ' if uncounted else ''}{', '.join(uncounted)}")
    kinds = {call.shapes for batch in batches for call in batch.calls}
    said = _said(batches[0].calls[0])
    inputs = said if len(kinds) == 1 else f"{said} and others, the mean of them"
    return Counted(cost, counter.dtype, inputs, uncounted)


def _without_numbers(leaf: Any) -> Any:
    """A leaf of the same shape and dtype that takes no memory."""
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
    return leaf.detach().new_empty(tuple(leaf.shape), device="meta")


def _cost_of(counter: Counter, batches: Sequence[Seen]) -> Cost:
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
    elif found.model is None:
        reason = found.why_not
    elif context.build and context.build_flops is None:
        reason = f"the build {context.build} serves, and its archive does not say what the model takes that it is of"
    if reason:
        context.load_warnings.append(f"{NOT_COUNTED}: {reason}")
        return None
    model, known = found.model, None
    if context.build and context.build_flops is not None:
        try:
            known = _read(context.build_flops)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            context.load_warnings.append(f"{NOT_COUNTED}: the archive's figures cannot be read ({error!r})")
            return None
    device = "cpu"
    if is_session(model):
        if any("CPU" not in provider for provider in model.get_providers()[:1]):
            device = "other"
    elif (first := next(iter(model.parameters()), None)) is not None:
        device = str(first.device)
    path = path_of(handle, model)
    watch = Watch(model, context, lambda: make_counter(model, path), peaks, device, known)
    try:
        watch.__enter__()
    except Exception as error:  # a model that takes no hooks
        context.load_warnings.append(f"{NOT_COUNTED}: the model takes no hooks ({type(error).__name__})")
        return None
    return watch


def path_of(handle: Any, model: Any) -> str:
    """The file of a handler's model, where that is known; else empty."""
    if is_session(model):
        return str(getattr(model, "_model_path", None) or "")
    return str(getattr(getattr(handle, "__self__", None), "model_pt_path", None) or "")


def make_counter(model: Any, path: str) -> Counter:
    """What counts a module, or a session. Raises NotCounted."""
    if is_session(model):
        from marserve_handlers.flops.graphs import CountedGraph  # here: a session's process need not have torch

        return CountedGraph(path)
    from marserve_handlers.flops.modules import CountedModule  # here: likewise

    return CountedModule(model, path)


def _read(said: Mapping[str, Any]) -> Counted:
    """What an archive says, as `as_document` wrote it."""
    cost = Cost(float(said["perBatch"]), float(said["perRequest"]))
    if not (0 <= cost.per_batch < math.inf and 0 <= cost.per_row < math.inf and 0 < cost.of(1) < math.inf):
        raise ValueError(f"{cost} is no cost")
    return Counted(cost, str(said["dtype"]), str(said["inputs"]), [str(name) for name in said["uncounted"]])


def as_document(counted: Counted) -> dict[str, Any]:
    """What was counted, for an archive of a build of the model."""
    return {
        "perBatch": counted.cost.per_batch,
        "perRequest": counted.cost.per_row,
        "dtype": counted.dtype,
        "inputs": counted.inputs,
        "uncounted": list(counted.uncounted),
    }
