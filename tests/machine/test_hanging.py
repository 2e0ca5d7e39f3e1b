"""Tests for what is seen of a call that does not come back."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve.files.regular import open_regular
from marserve.machine.hanging import Stillness, describe_call, is_waiting_for_events, pending_signals
from support.server import poll


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe in whose opening a thread hangs until the test is over."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: os.close(os.open(path, os.O_RDONLY)), name="hangs")
    thread.start()
    yield path
    os.close(os.open(path, os.O_WRONLY))
    thread.join()


def hanging_thread(path: Path) -> int:
    """The thread that hangs there, once it does."""
    (thread,) = [each for each in threading.enumerate() if each.name == "hangs"]
    ident = thread.ident or 0
    for _ in poll(10, "it opens the pipe"):
        sleeps = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S"
        if sleeps and str(path) in describe_call(ident):
            break
    return ident


def test_a_thread_that_computes_does_not_stand_still() -> None:
    """However long one call in C takes."""
    is_over = threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            pow(3, 20_000)

    thread = threading.Thread(target=compute)
    thread.start()
    assert thread.ident is not None
    stillness = Stillness()
    now = 0.0
    try:
        stillness.look([thread.ident], now)
        for _ in poll(10, "it gets the processor"):
            now += 1.0
            if stillness.look([thread.ident], now) == {thread.ident: 0.0}:
                break
    finally:
        is_over.set()
        thread.join()

    assert stillness.look([thread.ident], now + 1.0) == {}


def test_looking_at_a_thread_leaves_what_others_hold_to_them() -> None:
    """An object of a function that returns meanwhile is freed in the function's thread."""
    freed_in: list[int] = []
    is_over = threading.Event()

    class Held:
        name = "held"

        def __del__(self) -> None:
            freed_in.append(threading.get_ident())

    def keep() -> None:
        kept = Held()
        for _ in range(20):
            len(kept.name)

    def work() -> None:
        while not is_over.is_set():
            keep()

    before = sys.getswitchinterval()
    gc.disable()  # a collection between the two calls in C would run Hypothesis' callback, in which threads change
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5000):
            describe_call(threading.get_ident())
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(before)
        gc.enable()

    assert set(freed_in) == {thread.ident}


def test_a_thread_that_hangs_stands_still_and_its_file_is_told(pipe: Path) -> None:
    """A thread that goes on stands nowhere for long; one that has ended is not told of."""
    ident = hanging_thread(pipe)
    own = threading.get_ident()
    stillness = Stillness()

    first = stillness.look([ident, own, 1], 10.0)
    second = stillness.look([ident, own, 1], 14.0)
    third = stillness.look([ident], 17.0)

    assert first == {ident: 0.0, own: 0.0}
    assert second[ident] == 4.0
    assert third == {ident: 7.0}
    assert describe_call(ident) == f"<lambda> of {pipe}"
    assert not is_waiting_for_events(ident)
    assert describe_call(1) == "a call"


def test_a_call_without_a_file_is_told_by_its_place_in_the_code() -> None:
    """An event of Python's own, as an example."""
    goes_on = threading.Event()
    thread = threading.Thread(target=goes_on.wait)
    thread.start()
    assert thread.ident is not None

    said = describe_call(thread.ident)
    goes_on.set()
    thread.join()

    assert "threading.py, line " in said


def test_the_file_is_found_in_the_callers_too(tmp_path: Path) -> None:
    """What asks the system may know a descriptor alone."""
    said: list[str] = []
    (tmp_path / "a").write_text("x")

    def outer(path: Path) -> None:
        with open_regular(path):
            inner(3)

    def inner(number: int) -> None:
        said.append(describe_call(threading.get_ident()))

    outer(tmp_path / "a")

    assert said[0].endswith(f" of {tmp_path / 'a'}")


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_signal_that_the_main_thread_cannot_hear_is_seen() -> None:
    """Here because it is blocked."""
    main = threading.main_thread().ident
    assert main is not None
    if threading.get_ident() != main:
        pytest.skip("signals of another thread cannot be blocked")
    before = pending_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        signal.pthread_kill(main, signal.SIGTERM)
        waiting = pending_signals()
        signal.sigwait({signal.SIGTERM})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    assert before == set()
    assert waiting == {signal.SIGTERM}
    assert pending_signals() == set()
