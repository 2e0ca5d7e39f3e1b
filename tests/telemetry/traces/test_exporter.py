"""The thread that sends spans: bounded, counted, and never in the way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from marserve.telemetry.happenings import Happening
from marserve.telemetry.traces.exporter import Exporter
from marserve.telemetry.traces.spans import Span

ITEM = Happening("load", 1.0, 2.0, "m", "1", "loaded")


class Collector:
    """Takes spans as it is told to."""

    def __init__(self) -> None:
        self.taken: list[Span] = []
        self.why = ""
        self.is_open = threading.Event()
        self.is_open.set()
        self.was_asked = threading.Event()
        self.sizes: list[int] = []
        self.is_closed = False

    def send(self, spans: Sequence[Span]) -> str:
        """Take them when it is open."""
        self.was_asked.set()
        self.is_open.wait(30)
        if self.why == "raise":
            raise OSError("no route to host")
        if not self.why:
            self.taken += spans
            self.sizes.append(len(spans))
        return self.why

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


@pytest.fixture
def collector() -> Iterator[Collector]:
    """One that lets its thread go at the end."""
    one = Collector()
    yield one
    one.is_open.set()


def wait_for(is_so: Callable[[], bool]) -> None:
    """Until something that another thread does."""
    until = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_what_ended_is_sent_after_a_moment(collector: Collector) -> None:
    """Several together."""
    exporter = Exporter(collector, delay_s=0.05)
    exporter.start()
    for _ in range(3):
        exporter.take(ITEM)
    wait_for(lambda: exporter.sent == 3)
    exporter.stop()
    assert [each.name for each in collector.taken] == ["load m"] * 3
    assert collector.is_closed


def test_many_are_sent_at_once_and_so_many_together(collector: Collector) -> None:
    """They do not wait for the delay."""
    exporter = Exporter(collector, together=10, delay_s=60.0)
    exporter.start()
    for _ in range(25):
        exporter.take(ITEM)
    wait_for(lambda: exporter.sent >= 20)
    exporter.stop()
    assert exporter.sent == 25
    assert max(collector.sizes) == 10


def test_a_collector_that_hangs_costs_a_bounded_queue_and_a_bounded_stop(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """What finds no room is dropped, counted, and told of once; so is what was being sent at the end."""
    collector.is_open.clear()
    exporter = Exporter(collector, most_waiting=50, together=10, delay_s=0.01)
    exporter.start()
    exporter.take(ITEM)
    assert collector.was_asked.wait(10)
    began = time.monotonic()
    for _ in range(1000):
        exporter.take(ITEM)
    assert time.monotonic() - began < 1.0
    assert exporter.waiting == 50
    assert exporter.dropped["queue_full"] == 950
    [warning] = [each.getMessage() for each in caplog.records]
    assert warning.startswith("The collector is slow: spans are dropped (50 requests wait), 1 so far.")

    began = time.monotonic()
    exporter.stop(0.2)
    assert time.monotonic() - began < 1.0
    assert exporter.dropped["stopped"] == 51
    exporter.take(ITEM)
    assert exporter.dropped["stopped"] == 52


@pytest.mark.parametrize("why", ["raise", "503 Service Unavailable"])
def test_a_collector_that_takes_nothing_is_told_of_once(
    collector: Collector, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans are counted as lost; when it takes them again that is told, too."""
    caplog.set_level(logging.INFO)
    collector.why = why
    exporter = Exporter(collector, delay_s=0.01)
    exporter.start()
    for number in range(3):
        exporter.take(ITEM)
        wait_for(lambda number=number: exporter.dropped["not_taken"] == number + 1)
    collector.why = ""
    exporter.take(ITEM)
    wait_for(lambda: exporter.sent == 1)
    exporter.stop()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    [warning] = warnings
    assert warning.startswith("The collector takes no traces (")
    assert "1 spans are lost so far" in warning
    assert "The collector takes traces again; 3 spans were lost" in caplog.text


def test_the_stop_sends_what_waits(collector: Collector) -> None:
    """Nothing is lost with a collector that works."""
    exporter = Exporter(collector, delay_s=60.0)
    exporter.start()
    exporter.take(ITEM)
    exporter.stop()
    assert exporter.sent == 1
    assert sum(exporter.dropped.values()) == 0
