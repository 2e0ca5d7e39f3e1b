"""Sees what a model is called with by the first batches, and has that counted beside what is served.

After `BATCHES` of them a thread copies the model without its numbers, which takes milliseconds, and a process counts
(`apart`). The thread tells the outcome as soon as it is there. The next call of the model ends the watch: from then on
it is called as if there had been none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from marserve_handlers.context import Context
from marserve_handlers.flops.apart import count_apart, pack
from marserve_handlers.flops.cost import Cost, NotCounted
from marserve_handlers.flops.counting import BATCHES, Counted, Seen, path_of, read_document
from marserve_handlers.flops.peak import cached_peak
from marserve_handlers.optimising.call_arrays import Call
from marserve_handlers.optimising.capture import Capture, find_model
from marserve_handlers.support.comparing.held_models import is_session

MOST_CALLS = 64  # of a model by these batches
MOST_OF_REASON = 400  # characters
NOT_COUNTED = "FLOPs are not counted"
COPIED_WITHIN_S = 10.0  # a profile waits so long for a copy that is being made


class Outcome(NamedTuple):
    """What was counted: FLOPs a batch and a request, of inputs like `inputs`, and the peak for `dtype` a second."""

    cost: Cost
    peak: float
    dtype: str
    inputs: str


class Watch(Capture):
    """Hooks a model. `tell` gets the outcome and `warn` sentences for describe, both from a thread of the watch's own.

    Between `hold` and `release` nothing of it begins, and the worker's process does nothing for it: a profile runs.
    """

    def __init__(
        self,
        model: Any,
        context: Context,
        path: str,
        peaks: dict[str, float],
        device: str,
        known: Counted | None = None,
        count: Callable[[bytes], Counted] = count_apart,
    ) -> None:
        """`known` was counted before, so that only the peak is missing; `path` is the model's file, or empty."""
        super().__init__(model)
        self._known = known
        self.tell: Callable[[Outcome], None] = lambda outcome: None
        self.warn: Callable[[str], None] = lambda sentence: None
        self._context = context
        self._path = path
        self._count_packed = count
        self._peaks = peaks
        self._device = device
        self._batches: list[Seen] = []
        self._thread: threading.Thread | None = None
        self._is_packed = threading.Event()
        self._is_free = threading.Event()
        self._is_free.set()
        self._is_over = False

    def hold(self) -> None:
        """Begin nothing until `release`. Waits for the copy of the model, if one is being made."""
        self._is_free.clear()
        if self._thread is not None:
            self._is_packed.wait(COPIED_WITHIN_S)

    def release(self) -> None:
        """Go on."""
        self._is_free.set()

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # an author's own thread: nobody knows for which batch
        if self._is_over:
            self._close()
            return
        if self._thread is not None or not self._is_free.is_set():
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
        try:
            self.tell(self.outcome())
        except NotCounted as error:
            self._fail(str(error))
        except Exception as error:  # of a library's
            self._fail(f"{type(error).__name__}: {error}")
        self._batches = []
        self._is_packed.set()
        self._is_over = True

    def _fail(self, why: str) -> None:
        self._say(f"{NOT_COUNTED}: {why[:MOST_OF_REASON]}")

    def _say(self, sentence: str) -> None:
        self._context.load_warnings.append(sentence)
        self.warn(sentence)

    def outcome(self) -> Outcome:
        """Have what was seen counted. Raises NotCounted."""
        counted = self._known
        if counted is None:
            batches = self._batches
            if len(batches) == 1 and len(batches[0].calls) >= MOST_CALLS:
                raise NotCounted(f"one batch called the model {MOST_CALLS} times and more")
            packed = pack(self._model, self._path, batches)
            self._is_packed.set()
            self._is_free.wait()
            counted = self._count_packed(packed)
        self._is_packed.set()
        self._is_free.wait()
        given = self._peaks.get(counted.dtype, self._peaks.get(""))
        peak = given or cached_peak(counted.dtype, self._context.threads, self._device)
        if counted.uncounted:
            self._say(f"FLOPs are counted without {', '.join(counted.uncounted)}")
        return Outcome(counted.cost, peak, counted.dtype, counted.inputs)


def _without_numbers(leaf: Any) -> Any:
    """A leaf of the same shape and dtype that takes no memory."""
    if isinstance(leaf, np.ndarray):
        return np.broadcast_to(np.empty((), leaf.dtype), leaf.shape)
    return leaf.detach().new_empty(tuple(leaf.shape), device="meta")


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
            known = read_document(context.build_flops)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            context.load_warnings.append(f"{NOT_COUNTED}: the archive's figures cannot be read ({error!r})")
            return None
    device = "cpu"
    if is_session(model):
        if any("CPU" not in provider for provider in model.get_providers()[:1]):
            device = "other"
    elif (first := next(iter(model.parameters()), None)) is not None:
        device = str(first.device)
    watch = Watch(model, context, path_of(handle, model), peaks, device, known)
    try:
        watch.__enter__()
    except Exception as error:  # a model that takes no hooks
        context.load_warnings.append(f"{NOT_COUNTED}: the model takes no hooks ({type(error).__name__})")
        return None
    return watch
