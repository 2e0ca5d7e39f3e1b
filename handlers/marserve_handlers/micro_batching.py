"""Micro-batches: a batch cut into pieces that go through a handler's three steps like through a pipeline.

While the model runs one piece, the next one is preprocessed in another thread, and the last one postprocessed. Of use
where the steps do not compete: a model on an accelerator, decoding that leaves the interpreter's lock.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

HANDLER_METHODS = ("preprocess", "inference", "postprocess")
"""The steps, in order."""


class WorkerThread(NamedTuple):
    """A thread of one step, and the event that ends it."""

    event: threading.Event
    thread: threading.Thread


class _Failed(NamedTuple):
    """What a step raised, on its way through the queues in the place of a result."""

    error: BaseException


def execute_call(
    in_queue: queue.Queue[Any],
    out_queue: queue.Queue[Any],
    handle: Callable[[Any], Any],
    thread_local_data: Any,
    event: threading.Event,
) -> None:
    """A thread's work: take (index, data), put (index, `handle(data)`), until `event` is set and None came in.

    What `handle` raises is passed on instead of a result, and not handled further.
    """
    while not event.is_set():
        taken = in_queue.get()
        if taken is None:
            continue  # a thread has the order to end, and wakes all that look
        idx, data = taken
        if not isinstance(data, _Failed):
            thread_local_data.micro_batch_idx = idx
            try:
                data = handle(data)
            except BaseException as error:  # a border: it is raised again where the batch is waited for
                data = _Failed(error)
        out_queue.put((idx, data))


class MicroBatching:
    """Put in the place of a handler's `handle`: `self.handle = MicroBatching(self, micro_batch_size)`.

    `parallelism` is how many threads each step has: `{"preprocess": 2}`; 1 where it says nothing. Threads start at the
    first batch, and end with `shutdown` or with this object.
    """

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        if type(micro_batch_size) is not int or micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size!r}; it must be a whole number above 0.")
        self.handler = parent_handler
        self.micro_batch_size = micro_batch_size
        self.thread_groups: dict[str, list[WorkerThread]] = {step: [] for step in HANDLER_METHODS}
        self.thread_local_data = threading.local()
        self._parallelism: dict[str, int] = dict.fromkeys(HANDLER_METHODS, 1)
        self._create_queues()
        self.parallelism = parallelism or {}

    def __del__(self) -> None:
        # Not waited for: when the interpreter ends, threads like these never finish.
        for number, threads in enumerate(getattr(self, "thread_groups", {}).values()):
            for worker in threads:
                worker.event.set()
            for _ in threads:
                self.queues[number].put(None)

    @property
    def parallelism(self) -> dict[str, int]:
        """Threads of each step."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, parallelism: Mapping[str, int]) -> None:
        unknown = sorted(set(parallelism) - set(HANDLER_METHODS))
        if unknown:
            raise ValueError(f"parallelism names {', '.join(unknown)}; the steps are {', '.join(HANDLER_METHODS)}.")
        for step, count in parallelism.items():
            if type(count) is not int or count < 1:
                raise ValueError(f"parallelism of {step} is {count!r}; it must be a whole number above 0.")
        self._parallelism |= parallelism
        if any(self.thread_groups.values()):
            self._update_threads()

    def shutdown(self) -> None:
        """End all threads; the next batch starts them again."""
        for step, threads in getattr(self, "thread_groups", {}).items():
            self._end_threads(step, threads)

    def get_micro_batch_idx(self) -> int:
        """Inside a step: which piece of the batch it works on, from 0."""
        idx: int = self.thread_local_data.micro_batch_idx
        return idx

    def handle(self, data: list[Any]) -> list[Any]:
        """Send the batch through the steps in pieces: the answers of all of them, in order.

        Raises what the first piece that failed raised, once all pieces are through.
        """
        self._update_threads()
        size = self.micro_batch_size
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        for idx, piece in enumerate(pieces):
            self.queues[0].put((idx, piece))
        done = dict(self.queues[-1].get() for _ in pieces)
        answers: list[Any] = []
        for idx in range(len(pieces)):
            if isinstance(done[idx], _Failed):
                raise done[idx].error
            answers += done[idx]
        return answers

    def __call__(self, data: list[Any], context: Any) -> Any:
        """Answer a batch, as a handler's `handle`; describe and explain requests are not cut."""
        began = time.perf_counter()
        handler = self.handler
        handler.context = context
        if handler._is_describe() or handler._is_explain():
            return handler._answer(data)
        answers = self.handle(data)
        if context.metrics is not None:
            context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return answers

    def _create_queues(self) -> None:
        """One queue before each step, and one behind the last."""
        self.queues: list[queue.Queue[Any]] = [queue.Queue() for _ in range(len(HANDLER_METHODS) + 1)]

    def _update_threads(self) -> None:
        """Start and end threads until each step has as many as it should."""
        for number, step in enumerate(HANDLER_METHODS):
            threads = self.thread_groups[step]
            wanted = self._parallelism[step]
            self._end_threads(step, threads[wanted:])
            while len(threads) < wanted:
                event = threading.Event()
                arguments = (
                    self.queues[number],
                    self.queues[number + 1],
                    getattr(self.handler, step),
                    self.thread_local_data,
                    event,
                )
                thread = threading.Thread(target=execute_call, args=arguments, name=f"micro-batch {step}", daemon=True)
                threads.append(WorkerThread(event, thread))
                thread.start()

    def _end_threads(self, step: str, ending: list[WorkerThread]) -> None:
        ending = list(ending)
        for worker in ending:
            worker.event.set()
        for worker in ending:
            # The thread that wakes may be one that stays: it then passes the wake-up on.
            while worker.thread.is_alive() and worker.thread is not threading.current_thread():
                self.queues[HANDLER_METHODS.index(step)].put(None)
                worker.thread.join(0.05)
            self.thread_groups[step].remove(worker)
