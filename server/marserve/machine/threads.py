"""Threads for calls that block. One that never returns delays neither the server's end nor the process's.

Python's own executor joins its threads at its shutdown and once more when the interpreter ends, however long that
takes. Also, a call fails there if the system gives no thread for it, although other threads could run it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

# How long `shutdown` waits for calls that run.
SHUTDOWN_LIMIT_S = 2.0

_bounded: set[int] = set()


@contextlib.contextmanager
def bounded_by_caller() -> Iterator[None]:
    """For the body of a call whose caller bounds its time: `DaemonThreads.calls` leaves the call out."""
    thread = threading.get_ident()
    _bounded.add(thread)
    try:
        yield
    finally:
        _bounded.discard(thread)


@dataclass(frozen=True, slots=True)
class _Call:
    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function(*self.args, **self.kwargs)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # it was given up
                self.future.set_exception(error)
            del self  # the traceback has this frame: the cycle would keep what the call was given
        else:
            with contextlib.suppress(InvalidStateError):
                self.future.set_result(result)


class DaemonThreads(ThreadPoolExecutor):
    """At most `most` threads, begun when calls need them, of which `ready` are begun at once.

    A `ThreadPoolExecutor` because asyncio's loops take nothing else as their own; only its type is used. Raises
    RuntimeError where the system gives not even the first thread.
    """

    def __init__(self, most: int, name: str, *, ready: int = 0) -> None:
        super().__init__(most, thread_name_prefix=name)
        self._most = most
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._running: set[threading.Thread] = set()
        self._under_way: dict[int, tuple[_Call, float]] = {}
        self._unfinished = 0
        self._is_closed = False
        self._change = threading.Lock()
        with self._change:
            for _ in range(ready):
                self._begin()

    def submit(self, fn: Callable[P, Result], /, *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Have a thread call `fn`. Raises RuntimeError after `shutdown`, and where there is not a single thread."""
        future: Future[Result] = Future()
        with self._change:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if len(self._running) < min(self._unfinished + 1, self._most):
                try:
                    self._begin()
                except RuntimeError:
                    if not self._running:
                        raise
            self._unfinished += 1
            self._calls.put(_Call(future, fn, args, kwargs))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait `SHUTDOWN_LIMIT_S` at most for those that run."""
        with self._change:
            self._is_closed = True
            if cancel_futures:
                with contextlib.suppress(queue.Empty):
                    while True:
                        call = self._calls.get_nowait()
                        if call is not None:
                            call.future.cancel()
            for _ in self._running:
                self._calls.put(None)
            threads = list(self._running)
        until = time.monotonic() + SHUTDOWN_LIMIT_S
        for thread in threads if wait else ():
            thread.join(max(0.0, until - time.monotonic()))

    def calls(self) -> dict[int, float]:
        """The threads that run a call now, by their identity, and when each began on the monotonic clock.

        Calls in `bounded_by_caller` are left out.
        """
        return {thread: began for thread, (_, began) in self._under_way.copy().items() if thread not in _bounded}

    def give_up(self, thread: int, error: Exception) -> None:
        """Have the call that this thread runs end with `error` for its caller. The thread itself cannot be ended."""
        call, _ = self._under_way.get(thread, (None, 0.0))
        if call is not None:
            with contextlib.suppress(InvalidStateError):  # it has just ended
                call.future.set_exception(error)

    @property
    def hanging(self) -> int:
        """After `shutdown`: how many threads have not ended."""
        return len(self._running)

    def _begin(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}_{len(self._running)}", daemon=True)
        thread.start()
        self._running.add(thread)

    def _work(self) -> None:
        thread = threading.get_ident()
        while (call := self._calls.get()) is not None:
            self._under_way[thread] = call, time.monotonic()
            call.run()
            del call, self._under_way[thread]
            with self._change:
                self._unfinished -= 1
        with self._change:
            self._running.discard(threading.current_thread())
