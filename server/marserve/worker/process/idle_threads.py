"""Threads that a loaded model has left behind: idle ones are ended before a fork, the others are described.

A fork has only the main thread. Threads that only wait for work are ended before it. Their owners start new ones when
they need them, in the template and in each fork:

    tqdm's monitor                  refreshes progress bars; the next bar starts another one
    idle ThreadPoolExecutors        their threads wait for work; the next `submit` starts others

They are ended only if all threads are of these kinds and none is in use: no bar is open, no work runs or waits. Every
other thread is named in the reasons against forking, with what its author can do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor
    from types import FrameType

# How long a thread may take to end, in seconds.
END_WITHIN_S = 1.0
# How many looks there are whether an executor's threads are idle, and the pause between them.
LOOKS, LOOK_S = 20, 0.01


def end_idle_threads() -> None:
    """End the threads that only wait for work, if there are no others. Call it in the main thread."""
    _give_bars_a_lock_of_this_process()
    for _ in range(LOOKS):
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        monitors = [thread for thread in others if _is_monitor(thread)]
        pools = _idle_executors()
        idle = {id(thread) for threads in pools.values() for thread in threads}
        orphans = [thread for thread in others if _has_lost_its_executor(thread)]
        idle |= {id(thread) for thread in (*monitors, *orphans)}
        left = [thread for thread in others if id(thread) not in idle]
        if not left:
            break
        if not all(thread in _work_queues() for thread in left):
            return
        time.sleep(LOOK_S)  # a thread whose result is there may not be back at waiting yet
    if left or any(_has_open_bars(thread) for thread in monitors):
        return
    for monitor in monitors:
        _end_monitor(monitor)
    for executor in pools:
        _empty(executor)
    for thread in orphans:  # they end by themselves: nothing can give them work any more
        thread.join(END_WITHIN_S)


def describe_threads() -> list[str]:
    """For each thread that forbids a fork: its name, its owner, how to avoid it; then the number of idle ones."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    idle = {id(thread) for threads in _idle_executors().values() for thread in threads}
    idle |= {id(thread) for thread in others if _is_monitor(thread) and not _has_open_bars(thread)}
    said = [_describe(thread) for thread in others if id(thread) not in idle]
    own = {thread.native_id for thread in others} | {os.getpid()}
    native = Counter(name for number, name in _tasks() if number not in own)
    if native:
        names = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in sorted(native.items()))
        said.append(
            f"{names} of native code (OpenMP, BLAS, tokenizers, a runtime: a computation while the model loads starts "
            "them; leave that to the first request)"
        )
    return [*said, f"{len(idle)} that only wait for work"] if idle else said


def _describe(thread: threading.Thread) -> str:
    """One thread of Python's."""
    whose = _owner_of(thread)
    named = f"{thread.name}{f' of {whose}' if whose else ''}"
    if _is_monitor(thread):
        return f"{named} (a progress bar is open: close it when the model is loaded)"
    if thread in _work_queues():
        return f"{named} (an executor at work: wait for its results, or shut it down, before the model is loaded)"
    if whose.startswith("logging."):
        return f"{named} (stop the listener when the model is loaded, and start it at the first request)"
    return f"{named} (start it at the first request, not while the model loads)"


def _owner_of(thread: threading.Thread) -> str:
    """The class or the function whose code the thread runs, as `module.name`."""
    target: Any = getattr(thread, "_target", None)
    if target is None:
        kind: Any = type(thread)
        return "" if kind is threading.Thread else f"{kind.__module__}.{kind.__qualname__}"
    owner = getattr(target, "__self__", None)
    if owner is not None and not isinstance(owner, type):
        return f"{type(owner).__module__}.{type(owner).__qualname__}"
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}".lstrip(".")


def _tasks() -> Iterator[tuple[int, str]]:
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            yield int(task.name), (task / "comm").read_text().strip()


# ------------------------------------------------------------------------------------------------ tqdm


def _is_monitor(thread: threading.Thread) -> bool:
    kind = type(thread)
    return kind.__name__ == "TMonitor" and kind.__module__.startswith("tqdm.")


def _has_open_bars(monitor: Any) -> bool:
    """Whether the monitor has an open bar. Bars that nothing refers to do not count."""
    return any(not getattr(bar, "disable", False) for bar in list(getattr(monitor.tqdm_cls, "_instances", ())))


def _end_monitor(monitor: Any) -> None:
    """End a monitor as its own `exit` does, but with a bounded wait; its class starts another with the next bar."""
    monitor.was_killed.set()
    monitor.join(END_WITHIN_S)
    if not monitor.is_alive() and monitor.tqdm_cls.__dict__.get("monitor") is monitor:
        monitor.tqdm_cls.monitor = None


def _give_bars_a_lock_of_this_process() -> None:
    """Replace tqdm's lock, a semaphore that forks share: a fork killed while it draws would block the others."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is None:
        return
    classes = [bars]
    for each in classes:
        classes += each.__subclasses__()
        if type(each.__dict__.get("_lock")).__name__ == "TqdmDefaultWriteLock":
            each.set_lock(threading.RLock())


# ------------------------------------------------------------------------------------------------ executors


def _work_queues() -> Any:
    """The threads of all executors, each with its queue; none where no module has imported executors."""
    executors: Any = sys.modules.get("concurrent.futures.thread")
    return {} if executors is None else executors._threads_queues


def _idle_executors() -> dict[ThreadPoolExecutor, list[threading.Thread]]:
    """The executors whose threads all wait for work, with these threads."""
    found: dict[ThreadPoolExecutor, list[threading.Thread]] = {}
    for thread in list(_work_queues()):
        executor = _executor_of(thread)
        if executor is not None and executor not in found and _is_idle(executor):
            found[executor] = list(executor._threads)
    return found


def _executor_of(thread: threading.Thread) -> ThreadPoolExecutor | None:
    """The executor that started a thread; None if nothing refers to it any more."""
    reference = _reference_of(thread)
    return None if reference is None else reference()


def _reference_of(thread: threading.Thread) -> weakref.ref[ThreadPoolExecutor] | None:
    """The reference to its executor that a thread has, as its first argument, until it has ended."""
    arguments: Any = getattr(thread, "_args", ())
    return arguments[0] if arguments and isinstance(arguments[0], weakref.ref) else None


def _is_idle(executor: ThreadPoolExecutor) -> bool:
    """Whether all of its threads wait for work, and there is none.

    Its own count of waiting threads is a lower bound from Python 3.12 on, so the threads' frames are looked at.
    """
    try:
        threads = executor._threads
        if not threads or executor._shutdown or not executor._work_queue.empty():
            return False
    except AttributeError:
        return False
    frames = sys._current_frames()
    return all(_waits_for_work(frames.get(thread.ident or 0)) for thread in threads)


def _waits_for_work(frame: FrameType | None) -> bool:
    """Whether this is the innermost frame of an executor's thread that has no work in hand."""
    executors: Any = sys.modules["concurrent.futures.thread"]
    return frame is not None and frame.f_code is executors._worker.__code__ and "work_item" not in frame.f_locals


def _has_lost_its_executor(thread: threading.Thread) -> bool:
    """Whether nothing refers to its executor any more, so that it ends now."""
    if thread not in _work_queues():
        return False
    reference = _reference_of(thread)
    return reference is not None and reference() is None


def _empty(executor: Any) -> None:
    """End an idle executor's threads, and leave it as it was before its first work.

    `shutdown` would end it for good. No work can come meanwhile: only the main thread is left to submit it.
    """
    from queue import Empty  # here: few models have executors, and each template would hold it

    threads: list[threading.Thread] = list(executor._threads)
    queues = _work_queues()
    with executor._shutdown_lock:
        executor._shutdown = True
        executor._work_queue.put(None)  # each thread that ends puts it back for the next
    for thread in threads:
        thread.join(END_WITHIN_S)
    with executor._shutdown_lock:
        with contextlib.suppress(Empty):
            while True:
                executor._work_queue.get_nowait()
        executor._shutdown = False
        if any(thread.is_alive() for thread in threads):
            return  # `describe_threads` names them, and nothing is forked
        for thread in threads:
            queues.pop(thread, None)
        executor._threads.clear()
        executor._idle_semaphore = threading.Semaphore(0)
