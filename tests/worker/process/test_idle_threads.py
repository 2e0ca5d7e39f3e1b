"""Threads that a loaded model leaves behind: the idle ones end before a fork, the others are named with what to do."""

from __future__ import annotations

import functools
import gc
import io
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from logging.handlers import QueueListener
from typing import Any

import pytest
from tqdm import tqdm

from marserve.worker.process.idle_threads import describe_threads, end_idle_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
WITHIN_S = 10


Scenario = Callable[[], None]


def in_a_process(scenario: Scenario) -> Callable[[], None]:
    """Make a test of a scenario that runs in a fork: there the test's thread is the only one, whatever runs tests."""

    @functools.wraps(scenario)
    def test() -> None:
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, from Python 3.12 on
            pid = os.fork()
        if pid == 0:
            signal.alarm(4 * WITHIN_S)
            try:
                assert threading.active_count() == 1
                tqdm.monitor = None  # one that the runner has lost its thread in the fork
                scenario()
            except BaseException:
                os.write(writer, traceback.format_exc()[-60_000:].encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader) as said:
            failure = said.read()
        assert (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), failure) == (0, "")

    return test


def bar() -> Any:
    """A progress bar that shows nothing, with its monitor."""
    made = tqdm(total=1, file=io.StringIO())
    assert any(thread.name == "tqdm_monitor" for thread in threading.enumerate())
    return made


def in_a_fork(check: Any) -> int:
    """Run a check in a fork; its status, 0 where it held, and -SIGALRM where it hung."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(WITHIN_S)
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@in_a_process
def test_tqdms_monitor_ends_and_the_next_bar_has_one_again() -> None:
    """transformers shows a bar while it loads weights; the thread stays behind."""
    bar().close()
    gc.collect()

    end_idle_threads()

    assert threading.active_count() == 1
    told = describe_threads()  # once: a task of the kernel may be about to go
    assert told == [text for text in told if "native code" in text]
    assert in_a_fork(lambda: bar().update() is not None or tqdm.monitor.report()) == 0
    second = bar()
    second.close()


@in_a_process
def test_a_bar_that_is_open_keeps_its_monitor_and_is_named() -> None:
    """It is in use."""
    open_bar = bar()

    end_idle_threads()
    told = describe_threads()
    open_bar.close()

    assert any("tqdm_monitor of tqdm._monitor.TMonitor (a progress bar is open: close it" in text for text in told)


@in_a_process
def test_forks_do_not_share_the_lock_of_progress_bars() -> None:
    """Its semaphore is one for all: a fork killed while it draws would stop the bars of the others for ever."""
    bar().close()
    gc.collect()
    end_idle_threads()

    def take_and_die() -> bool:
        tqdm.get_lock().acquire()
        os._exit(0)

    assert in_a_fork(take_and_die) == 0
    assert in_a_fork(lambda: tqdm.get_lock().acquire(timeout=5)) == 0


@in_a_process
def test_an_idle_executor_loses_its_threads_and_works_again_in_the_template_and_in_forks() -> None:
    """Its next work starts threads; before, work in a fork waited for threads that were not there."""
    with ThreadPoolExecutor(3) as executor:
        assert sorted(executor.map(abs, range(-9, 0))) == list(range(1, 10))

        end_idle_threads()

        assert threading.active_count() == 1
        assert in_a_fork(lambda: list(executor.map(abs, [-5] * 20)) == [5] * 20) == 0
        assert executor.submit(abs, -4).result(WITHIN_S) == 4
        end_idle_threads()
        assert executor.submit(abs, -3).result(WITHIN_S) == 3
    with pytest.raises(RuntimeError, match="cannot schedule"):
        executor.submit(abs, -1)


@in_a_process
def test_an_executor_at_work_is_left_alone_and_named() -> None:
    """Also where another one, and a monitor, are idle: nothing is ended for a fork that there will not be."""
    leave = threading.Event()
    with ThreadPoolExecutor(1) as idle, ThreadPoolExecutor(1, thread_name_prefix="loader") as busy:
        idle.submit(abs, 1).result()
        bar().close()
        working = busy.submit(leave.wait)  # without a limit: work that ends by itself is found idle

        end_idle_threads()
        told = describe_threads()

        assert threading.active_count() == 4
        assert any("loader_0 of concurrent.futures.thread._worker (an executor at work: wait" in text for text in told)
        leave.set()
        assert working.result() is True


@in_a_process
def test_an_executor_that_was_dropped_is_waited_for() -> None:
    """Its threads end by themselves, a moment later."""
    ThreadPoolExecutor(2).submit(abs, 1).result()
    gc.collect()

    end_idle_threads()

    assert threading.active_count() == 1


@in_a_process
def test_other_threads_are_named_with_whose_they_are_and_left_alone() -> None:
    """A log's listener, and one of the author's."""
    leave = threading.Event()
    lines: queue.Queue[Any] = queue.Queue()
    listener = QueueListener(lines)
    with ExitStack() as ending:
        listener.start()
        ending.callback(listener.stop)
        author = threading.Thread(target=leave.wait, args=(WITHIN_S,), name="refresh", daemon=True)
        author.start()
        ending.callback(author.join)
        ending.callback(leave.set)

        end_idle_threads()
        told = describe_threads()

        assert author.is_alive()
        assert any("of logging.handlers.QueueListener (stop the listener" in text for text in told)
        assert any("refresh of threading.Event (start it at the first request" in text for text in told)


@in_a_process
def test_what_forbids_the_fork_is_named_and_what_is_idle_only_counted() -> None:
    """The author has to change the one, and not the others."""
    leave = threading.Event()
    author = threading.Thread(target=leave.wait, args=(WITHIN_S,), name="refresh")
    author.start()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(abs, 1).result()
        bar().close()
        gc.collect()

        end_idle_threads()
        told = describe_threads()

        assert threading.active_count() == 4
        assert [text.partition(" ")[0] for text in told if "native code" not in text] == ["refresh", "2"]
        assert told[-1] == "2 that only wait for work"
    leave.set()
    author.join()


def test_looking_for_executors_asks_no_object_for_its_class() -> None:
    """A proxy's class is what it stands for, and asking may import a library or warn."""
    asked = []

    class Proxy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            asked.append(self)
            return ThreadPoolExecutor

    proxy = [Proxy()]  # held where the collector sees it
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        end_idle_threads()

    assert proxy
    assert asked == []
