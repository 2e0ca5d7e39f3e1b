"""Metrics as lines: `ts_metrics.log` and `model_metrics.log`, in TorchServe's form (`metrics_mode=log`).

The event loop adds one small tuple a batch and never waits: tuples beyond the bound are dropped and counted. A thread
makes the lines, ten times a second. It reads the numbers of answers and of accepted requests from the counts, so these
cost the event loop nothing. `write` takes finished lines, with the name of their log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.measurements import ClassCounts, Event, Measurement, RequestCounts, measurements_of
from marserve.telemetry.metrics.metric_definitions import Definition
from marserve.telemetry.metrics.metric_line import java_doubles, line_middle, line_start

log = logging.getLogger("marserve.telemetry")

FRONT, MODEL = "TS_METRICS", "MODEL_METRICS"

MAX_EVENTS = 20_000
LINES_AT_ONCE = 16
EVERY_S = 0.1
# After so many lines the thread rests, so that the event loop can have the interpreter. The loop gives it up at each of
# its system calls, and without a rest it would wait for this thread at each of them.
PAUSE_EVERY = 256
PAUSE_S = 0.001

Write = Callable[[str, Sequence[str]], None]


class MetricsLog:
    """Makes lines of measurements and passes them to `write`, with TS_METRICS or MODEL_METRICS.

    `front` and `model` are the definitions by name; `model` may grow. Other metrics get no line. `skips` are names that
    are shown elsewhere.
    """

    def __init__(
        self,
        front: Mapping[str, Definition],
        model: Mapping[str, Definition],
        hostname: str,
        write: Write,
        skips: Iterable[str] = (),
    ) -> None:
        self.lost = 0
        self._front, self._model = front, model
        self._hostname = hostname
        self._write = write
        self._skips = frozenset(skips)
        self._events: deque[Event | _Gone] = deque()
        self._responses: Sequence[int] = [0] * 10
        self._classes = ClassCounts()
        self._versions: dict[VersionMetrics, RequestCounts] = {}
        self._returned: set[VersionMetrics] = set()
        self._told_lost = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-lines", daemon=True)

    def start(self, responses: Sequence[int]) -> None:
        """Start the thread. `responses` counts answers by the first digit of their status."""
        self._responses = responses
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, end the thread."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def take(self, event: Event) -> None:
        """Take an event; drop it if too many wait. Never blocks."""
        if len(self._events) >= MAX_EVENTS:
            self.lost += 1
            return
        self._events.append(event)

    def register(self, version: VersionMetrics) -> None:
        """Count this version's requests from now on."""
        if version in self._versions:  # it was removed a moment ago and goes on
            self._returned.add(version)
            return
        counts = RequestCounts(version.model, version.version)
        counts.skip(version.client_requests, version.named_requests)
        self._versions[version] = counts

    def remove(self, version: VersionMetrics) -> None:
        """Stop counting this version's requests, once those so far have their lines."""
        self._events.append(_Gone(version))

    def flush(self, now: float) -> None:
        """Make the lines of all events since the last time. For one thread."""
        chunks = {FRONT: _Chunks(FRONT, self._write), MODEL: _Chunks(MODEL, self._write)}
        timestamp_s = int(now)
        # Most lines of one moment differ only in their value.
        frames: dict[tuple[str, tuple[str, ...]], _Frame | None] = {}
        since_pause = 0
        for name, values, amounts, times, request_ids in self._measurements():
            key = name, values
            if key in frames:
                frame = frames[key]
            else:
                frame = frames[key] = self._frame(name, values, timestamp_s)
            if frame is None:
                continue
            target, start, middle, end = frame
            end = f"{middle},requestID:{request_ids}{end}" if request_ids else middle + end
            chunks[target].add([f"{start}{text}{end}" for text in java_doubles(amounts)], times)
            since_pause += len(amounts)
            if since_pause >= PAUSE_EVERY:
                since_pause = 0
                time.sleep(PAUSE_S)
        for each in chunks.values():
            each.send()
        if self.lost > self._told_lost:
            log.warning("%d events came faster than lines could be made of them: they are lost", self.lost)
            self._told_lost = self.lost

    def _frame(self, name: str, values: tuple[str, ...], timestamp_s: int) -> _Frame | None:
        """The text around the value in lines of a metric; None if it gets no lines."""
        if name in self._skips:
            return None
        definition, target = self._front.get(name), FRONT
        if definition is None:
            definition, target = self._model.get(name), MODEL
        if definition is None or len(values) + 1 != len(definition.dimensions):
            return None
        middle = line_middle(definition.dimensions, values, self._hostname)
        return _Frame(target, line_start(name, definition.unit), middle, f",timestamp:{timestamp_s}")

    def _measurements(self) -> Iterator[Measurement]:
        gone: list[VersionMetrics] = []
        events: list[Event] = []
        for _ in range(len(self._events)):
            event = self._events.popleft()
            if isinstance(event, _Gone):
                gone.append(event.version)
            else:
                events.append(event)
        yield from measurements_of(events)
        for version, counts in tuple(self._versions.items()):
            yield from counts.new(version.client_requests, version.named_requests)
        yield from self._classes.new(self._responses)
        for version in gone:
            if version in self._returned:
                self._returned.discard(version)
            else:
                self._versions.pop(version, None)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(EVERY_S)
            try:
                self.flush(time.time())
            except Exception:
                # One odd value must not end the thread.
                log.exception("lines of metrics were lost")


class _Frame(NamedTuple):
    """The common text of a metric's lines, and their log. Request ids stand before the end."""

    target: str
    start: str
    middle: str
    end: str


class _Gone:
    """A version that was removed."""

    __slots__ = ("version",)

    def __init__(self, version: VersionMetrics) -> None:
        self.version = version


class _Chunks:
    """Passes lines to `write` in small groups: a writer bounds how many records wait, not how long they are."""

    def __init__(self, name: str, write: Write) -> None:
        self._name, self._write = name, write
        self._lines: list[str] = []

    def add(self, lines: Sequence[str], times: int) -> None:
        """Add these lines, `times` times."""
        mine = self._lines
        if times > 1:
            lines = [line for line in lines for _ in range(times)]
        mine += lines
        while len(mine) >= LINES_AT_ONCE:
            self._write(self._name, mine[:LINES_AT_ONCE])
            del mine[:LINES_AT_ONCE]

    def send(self) -> None:
        """Write the lines added so far."""
        if self._lines:
            self._write(self._name, self._lines)
            self._lines = []
