"""How a worker spends its time, measured over some batches: `Measured` by the clocks, `Operators` by torch's profiler.

Loaded only for a profile. While one runs, the handler is called through `Measured.handle`; without one nothing of this
is on a batch's way. Torch's profiler holds what it records in memory until it is written, and cannot say how much that
is. So one batch is recorded alone and counted, and then as many as fit `max_bytes`. `key_averages` is not used: it
takes milliseconds an operator and doubles the memory.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import importlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from marserve.allocator import give_back_free_memory
from marserve.messages import MAX_PROFILED, Batch, Profile, ProfiledBatch
from marserve.worker.load import LoadedModel
from marserve.worker.outgoing import shown

# What the profiler holds for one operator of torch 2.13, in bytes.
PLAIN_BYTES: Final = 7_500
SHAPES_BYTES: Final = 22 * 1024
MEMORY_BYTES: Final = 34 * 1024
# How a batch is named in a trace; its number and the ids of its requests follow.
BATCH_MARK: Final = "marserve batch"
# In characters: the ids in a batch's name.
MAX_IDS: Final = 500
_SCHEDSTAT: Final = "/proc/thread-self/schedstat"


class Operators:
    """Records operators of torch: one batch, and then as many as fit. None at all where `why_none` says why."""

    def __init__(self, order: Profile, *, has_device: bool, counts: bool = True) -> None:
        """`counts` records one batch first and counts it; without, `finish` alone ends the recording."""
        self.why_none = ""
        self.recorded = 0
        self.traces: list[bytes] = []
        self._order = order
        self._counts = counts
        self._has_device = has_device
        self._left = 1
        self._profiler: Any = None
        self._torch: Any = sys.modules.get("torch")
        if order.max_bytes <= 0:
            self.why_none = "they were not asked for"
        elif self._torch is None:
            self.why_none = "this model does not use torch"
        elif os.environ.get("ENABLE_TORCH_PROFILER", "").upper() == "TRUE":
            self.why_none = "the handler runs torch's profiler itself (ENABLE_TORCH_PROFILER)"
        else:
            self._start()

    @property
    def is_recording(self) -> bool:
        """Whether the next batch is recorded."""
        return self._profiler is not None

    def batch(self, number: int, ids: str) -> AbstractContextManager[Any]:
        """Around one batch: marks it in the trace."""
        if self._profiler is None:
            return contextlib.nullcontext()
        mark: AbstractContextManager[Any] = self._torch.autograd.profiler.record_function(
            f"{BATCH_MARK} {number}: {ids[:MAX_IDS]}"
        )
        return mark

    def end_batch(self) -> None:
        """A batch has ended: the recording ends with it if no further one fits."""
        if self._profiler is None:
            return
        self.recorded += 1
        self._left -= 1
        if self._left > 0 or not self._counts:
            return
        operators = self._stop()
        if self.recorded == 1 and operators:
            each = MEMORY_BYTES if self._order.memory else SHAPES_BYTES if self._order.shapes else PLAIN_BYTES
            self._left = self._order.max_bytes // (operators * each)
            if self._left > 0:
                self._start()

    def finish(self) -> None:
        """End the recording, whatever has been recorded."""
        if self._profiler is not None:
            self._stop()

    def drop(self) -> None:
        """End it, and keep nothing."""
        if self._profiler is not None:
            with contextlib.suppress(Exception):
                self._profiler.__exit__(None, None, None)
            self._profiler = None
        self.traces = []
        _give_back()

    def _start(self) -> None:
        try:
            # The profiler that torch.profiler.profile has inside: its own start imports torch._dynamo and sympy, which
            # holds the worker up for more than a second and leaves 70 MiB in it.
            profiler = importlib.import_module("torch.autograd.profiler")
            config = importlib.import_module("torch._C._profiler")._ExperimentalConfig(profile_all_threads=True)
            order = self._order
            started = profiler.profile(
                use_cpu=True,
                use_kineto=True,
                use_device="cuda" if self._has_device and self._torch.cuda.is_available() else None,
                record_shapes=order.shapes,
                profile_memory=order.memory,
                with_stack=order.stacks,
                experimental_config=config,
            )
            started.__enter__()
            self._profiler = started
        except Exception as error:  # torch's: another profiler runs, or it is built without one
            self.why_none = f"torch's profiler did not start: {shown(error)[:300]}"

    def _stop(self) -> int:
        """Write what was recorded, and drop it. Returns how many operators, or calls of functions, there were."""
        profiler, self._profiler = self._profiler, None
        try:
            profiler.__exit__(None, None, None)
            with tempfile.TemporaryDirectory(prefix="marserve-profile-") as folder:
                path = os.path.join(folder, "trace.json")
                profiler.export_chrome_trace(path)
                with open(path, "rb") as file:
                    written = file.read()
        except Exception as error:  # torch's, or the disk is full: a profile fails no request
            self.why_none = f"the trace could not be written: {shown(error)[:300]}"
            profiler = None
            _give_back()
            return 0
        profiler = None
        found = written.count(b'"cat": "cpu_op"') + written.count(b'"cat": "python_function"')
        if not found:
            if not self.traces:
                ran = self.recorded or not self._counts
                self.why_none = "no operator of torch ran" if ran else "no batch ran"
            _give_back()
            return 0
        self.traces.append(gzip.compress(written, 1))
        del written
        _give_back()
        return found


class Measured:
    """Measures the batches of a model that is served, from now on; `handle` is called in place of the handler."""

    def __init__(self, order: Profile, model: LoadedModel) -> None:
        self.number = order.number
        self.requests = 0
        self.own_s = 0.0
        """What recording took between batches."""
        self.others: tuple[list[tuple[int, bytes]], list[str]] | None = None
        """What the other ranks recorded, each trace with its rank, and sentences; None until they have ended."""
        self.batches: list[ProfiledBatch] = []
        self.operators = Operators(order, has_device=model.load.gpu_id is not None)
        self.began = time.monotonic()
        self.model = model.calling(self.handle)
        """The model, called through this."""
        self._order = order
        self.inner = model.handle
        """The handler's own call."""
        self._called: tuple[float, float, float, float, float] | None = None
        self._collected_s = 0.0
        self._collects_since = 0.0
        self._thread = threading.get_ident()
        self._in_steps = model.load.is_continuous
        try:
            self._schedstat = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another system, or a kernel without it
            self._schedstat = -1
        gc.callbacks.append(self._on_collection)

    @property
    def knows_waiting(self) -> bool:
        """Whether the kernel says how long this thread waits for a processor."""
        return self._schedstat >= 0

    @property
    def is_complete(self) -> bool:
        """Whether all that was asked for is measured."""
        return 0 < self._order.requests <= self.requests or len(self.batches) >= MAX_PROFILED

    def run(self, batch: Batch, serve: Callable[[], None]) -> None:
        """Serve a batch, and measure it."""
        began = time.monotonic()
        self._called = None
        with self.operators.batch(batch.number, ",".join(item.id for item in batch.items[:32])):
            serve()
        ended = time.monotonic()
        self.operators.end_batch()
        self.own_s += time.monotonic() - ended
        # With continuous batching a request comes again with each step, then without its parts.
        requests = len(batch.items) if not self._in_steps else sum(bool(item.parts) for item in batch.items)
        self.requests += requests
        if self._called is None:  # no item of it was to be answered any more
            self.batches.append(ProfiledBatch(batch.number, requests, began, ended - began, 0.0, 0.0, 0.0, 0.0, 0.0))
            return
        at, seconds, cpu_s, waited_s, collected_s = self._called
        self.batches.append(
            ProfiledBatch(
                batch.number,
                requests,
                began,
                max(0.0, at - began),
                seconds,
                max(0.0, ended - at - seconds),
                min(seconds, max(0.0, cpu_s)),
                min(seconds, max(0.0, waited_s)),
                min(seconds, max(0.0, collected_s)),
            )
        )

    def handle(self, rows: list[dict[str, Any]], context: Any) -> Any:
        """The handler's call, with a look at the clocks before and after."""
        at, cpu_s, waited_s, collected_s = time.monotonic(), time.thread_time(), self._waited_s(), self._collected_s
        try:
            return self.inner(rows, context)
        finally:
            self._called = (
                at,
                time.monotonic() - at,
                time.thread_time() - cpu_s,
                self._waited_s() - waited_s,
                self._collected_s - collected_s,
            )

    def fitting(self, traces: list[tuple[int, bytes]]) -> tuple[list[tuple[int, bytes]], str]:
        """As many of these traces of ranks as the server takes, and a sentence about those left out, or "".

        The first batch is recorded whatever it runs, so its trace may be too large.
        """
        most, size = self._order.max_bytes, 0
        kept: list[tuple[int, bytes]] = []
        for rank, trace in traces:
            size += len(trace)
            if size > most:
                left = len(traces) - len(kept)
                return kept, f"{left} of {len(traces)} traces are left out: they have more than max_bytes, {most}"
            kept.append((rank, trace))
        return kept, ""

    def close(self) -> None:
        """Measure no more."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._on_collection)
        if self._schedstat >= 0:
            with contextlib.suppress(OSError):
                os.close(self._schedstat)

    def _waited_s(self) -> float:
        if self._schedstat < 0:
            return 0.0
        try:
            return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # an author's code may have closed the descriptor, or reused it
            self._schedstat = -1
            return 0.0

    def _on_collection(self, phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:  # another thread's
            return
        if phase == "start":  # its own time: while it waits for a processor is counted as waiting
            self._collects_since = time.thread_time()
        elif self._collects_since:
            self._collected_s += time.thread_time() - self._collects_since
            self._collects_since = 0.0


def threads() -> int:
    """How many threads an operator of torch may use; 1 without torch."""
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else 1


def _give_back() -> None:
    gc.collect()
    give_back_free_memory()
