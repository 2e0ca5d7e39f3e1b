"""Tests for the threads that block: calls run, failing starts are survived, and a call that hangs keeps nothing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import wait

import pytest

from marserve.machine import threads
from marserve.machine.threads import DaemonThreads, bounded_by_caller


def test_calls_run_side_by_side_up_to_the_bound() -> None:
    """Each call that waits has a thread of its own, the last waits for one."""
    executor = DaemonThreads(3, "t")
    begun, go = threading.Semaphore(0), threading.Event()

    def call(number: int) -> int:
        begun.release()
        go.wait(10)
        return number

    futures = [executor.submit(call, number) for number in range(4)]
    for _ in range(3):
        assert begun.acquire(timeout=10)
    assert not begun.acquire(timeout=0.05)
    go.set()

    assert [future.result(10) for future in futures] == [0, 1, 2, 3]
    executor.shutdown()
    assert executor.hanging == 0


class Given(bytearray):
    """What a call is given, and can be watched."""


def test_what_a_call_was_given_that_raised_is_kept_by_nothing() -> None:
    """Nor by a cycle of its exception and a frame: it may be a large body of a client's."""
    executor = DaemonThreads(1, "t")

    def fail(given: Given) -> None:
        raise ValueError(len(given))

    def watched() -> weakref.ref[Given]:
        given = Given(b"body")
        with pytest.raises(ValueError):
            executor.submit(fail, given).result(10)
        return weakref.ref(given)

    gc.collect()
    gc.disable()
    try:
        seen = watched()
        executor.submit(int).result(10)  # the thread has let go of the call before
        assert seen() is None
    finally:
        gc.enable()
        executor.shutdown()


def test_a_thread_that_is_free_takes_the_next_call() -> None:
    """One after the other needs one thread."""
    executor = DaemonThreads(8, "t")

    names = set()
    for _ in range(5):
        names.add(executor.submit(lambda: threading.current_thread().name).result(10))
        wait([executor.submit(int)])

    executor.shutdown()
    assert len(names) <= 2


def test_errors_and_cancels_belong_to_their_call() -> None:
    """The thread goes on."""
    executor = DaemonThreads(1, "t")
    go = threading.Event()
    first = executor.submit(go.wait, 10)
    cancelled, failing = executor.submit(int), executor.submit(int, "x")
    assert cancelled.cancel()
    go.set()

    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(10)
    assert first.result(10)
    executor.shutdown()
    with pytest.raises(RuntimeError):
        executor.submit(int)


def test_without_a_further_thread_those_that_are_there_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no more: Python's own executor fails the call although it will be run."""
    executor = DaemonThreads(4, "t", ready=1)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)

    assert [executor.submit(int, text).result(10) for text in ("1", "2")] == [1, 2]
    executor.shutdown()
    with pytest.raises(RuntimeError, match="can't start"):
        DaemonThreads(4, "t").submit(int)


def test_calls_that_have_not_begun_are_cancelled_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that runs is waited for within a bound."""
    monkeypatch.setattr(threads, "SHUTDOWN_LIMIT_S", 0.05)
    executor = DaemonThreads(1, "t")
    begun, go = threading.Event(), threading.Event()

    def call() -> bool:
        begun.set()
        return go.wait(10)

    running, waiting = executor.submit(call), executor.submit(int)
    assert begun.wait(10)

    executor.shutdown(cancel_futures=True)

    assert waiting.cancelled()
    assert executor.hanging == 1
    go.set()
    assert running.result(10)


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    """The interpreter's end joins the threads of Python's own executors."""
    program = """
import threading
from marserve.machine import threads
threads.SHUTDOWN_LIMIT_S = 0.05
executor = threads.DaemonThreads(2, "t")
executor.submit(threading.Event().wait)
executor.shutdown()
"""

    assert subprocess.run([sys.executable, "-c", program], timeout=30, check=False).returncode == 0


def test_a_call_that_is_given_up_ends_for_its_caller_and_what_comes_of_it_later_is_dropped() -> None:
    """The thread runs other calls when it comes back; a thread without a call has none to give up."""
    goes_on = threading.Event()
    threads = DaemonThreads(1, "blocking", ready=1)
    results = [threads.submit(goes_on.wait, 10), threads.submit(int, "7")]
    while not threads.calls():
        threading.Event().wait(0.001)
    (thread,) = threads.calls()

    threads.give_up(thread, OSError("it hangs"))
    threads.give_up(thread, OSError("again"))
    threads.give_up(0, OSError("nothing there"))
    with pytest.raises(OSError, match="it hangs"):
        results[0].result(10)
    goes_on.set()

    assert results[1].result(10) == 7
    threads.shutdown()
    assert threads.calls() == {}
    assert threads.hanging == 0


def test_a_call_whose_caller_bounds_its_time_is_left_out_while_it_says_so() -> None:
    """Before and after, the thread's calls are listed as any."""
    executor = DaemonThreads(1, "t")
    seen: list[bool] = []

    def look() -> None:
        seen.append(threading.get_ident() in executor.calls())

    def call() -> None:
        look()
        with bounded_by_caller():
            look()
        look()

    executor.submit(call).result(10)
    executor.shutdown()

    assert seen == [True, False, True]
