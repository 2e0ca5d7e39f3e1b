"""What keeps a worker from its work."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest

from marserve.worker.process.hindrances import Hindrances
from marserve.worker.process.hindrances import hindrances as of_process
from marserve.worker.process.printed_lines import MarkedStream


def test_a_collection_is_counted() -> None:
    """For as long as it takes."""
    hindrances = Hindrances()
    hindrances.begin()
    try:
        before = hindrances.before(0.0).collected_s
        keep = [[number] for number in range(200_000)]
        gc.collect()
        del keep
    finally:
        gc.callbacks.remove(hindrances._on_collection)

    assert hindrances.after(0.0, 1.0).collected_s > before


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="this kernel does not tell")
def test_waiting_for_a_processor_is_counted() -> None:
    """Beside others that compute on the same one."""
    hindrances = Hindrances()
    hindrances.begin()
    affinity = os.sched_getaffinity(0)
    one = {next(iter(affinity))}
    child = os.fork()
    if not child:
        os.sched_setaffinity(0, one)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            pass
        os._exit(0)
    try:
        os.sched_setaffinity(0, one)
        before = hindrances.after(0.0, 1.0).waited_s
        end = time.monotonic() + 5
        while hindrances.after(0.0, 1.0).waited_s - before < 0.005 and time.monotonic() < end:
            sum(range(10_000))
    finally:
        os.sched_setaffinity(0, affinity)
        os.kill(child, 9)
        os.waitpid(child, 0)
        gc.callbacks.remove(hindrances._on_collection)

    assert hindrances.after(0.0, 1.0).waited_s - before >= 0.005


def test_without_the_kernels_word_nothing_is_known_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other systems."""
    monkeypatch.setattr("marserve.worker.process.hindrances._SCHEDSTAT", "/nowhere")
    hindrances = Hindrances()
    hindrances.begin()
    gc.callbacks.remove(hindrances._on_collection)

    assert hindrances.after(0.0, 1.0).waited_s == 0.0


def test_a_descriptor_that_the_authors_code_closed_is_given_up() -> None:
    """It may belong to something else by now."""
    hindrances = Hindrances()
    hindrances.begin()
    gc.callbacks.remove(hindrances._on_collection)
    if hindrances._descriptor < 0:
        pytest.skip("this kernel does not tell")
    os.close(hindrances._descriptor)

    assert hindrances.after(0.0, 1.0).waited_s == 0.0
    assert hindrances.after(0.0, 1.0).waited_s == 0.0


def test_printing_that_blocks_is_counted() -> None:
    """The server reads a worker's lines slowly, if there are too many."""
    read_end, write_end = os.pipe()
    with open(write_end, "w", encoding="utf-8") as plain:
        stream = MarkedStream(plain)  # type: ignore[arg-type]
        before = of_process.printed_s
        reader = threading.Timer(0.2, lambda: os.read(read_end, 1 << 20))
        reader.start()
        stream.write("x" * 70_000 + "\n")  # more than a pipe holds
        reader.join()
        assert of_process.printed_s - before > 0.15
        stream.detach()
    os.close(read_end)


def test_the_kernel_is_asked_rarely_for_short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes two microseconds; what it said last is good for a while."""
    hindrances = Hindrances()
    asked = iter(range(1, 100))
    monkeypatch.setattr(hindrances, "_ask", lambda: float(next(asked)))

    assert hindrances.before(10.0).waited_s == 1.0
    assert hindrances.after(10.0005, 0.0005).waited_s == 1.0
    assert hindrances.before(10.001).waited_s == 1.0
    assert hindrances.after(10.101, 0.1).waited_s == 2.0
    assert hindrances.before(10.102).waited_s == 2.0
    assert hindrances.before(10.2).waited_s == 3.0
