"""Sends spans on a thread of its own. What waits for it is bounded; what finds no room is dropped and counted.

A collector that is slow or away costs the server nothing else, and the end of the server at most `STOP_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

from marserve.telemetry.traces.spans import Item, Span, count_spans, spans_of

log = logging.getLogger("marserve.traces")

Reason = Literal["queue_full", "not_taken", "stopped"]

# How long the end may wait for the last spans.
STOP_S: Final = 2.0
# How often a collector that takes nothing is told of in the log.
TELL_EVERY_S: Final = 60.0
DEFAULT_MOST_WAITING: Final = 2048
DEFAULT_SENT_TOGETHER: Final = 512
DEFAULT_DELAY_S: Final = 1.0


class Sender(Protocol):
    """Brings spans to a collector. Both calls are made on threads, and may take as long as their time limit."""

    def send(self, spans: Sequence[Span]) -> str:
        """Send them; why they were not taken, empty if they were. May raise anything."""

    def close(self) -> None:
        """End a send under way, and all further ones."""


class Exporter:
    """Takes what has ended, and has spans of it sent. `take` may be called on any thread, and never blocks.

    At most `most_waiting` requests wait, parts of requests included. `delay_s` is how long the first one waits for
    others, unless `together` are there.
    """

    def __init__(
        self,
        sender: Sender,
        *,
        most_waiting: int = DEFAULT_MOST_WAITING,
        together: int = DEFAULT_SENT_TOGETHER,
        delay_s: float = DEFAULT_DELAY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sent = 0
        self.dropped: dict[Reason, int] = {"queue_full": 0, "not_taken": 0, "stopped": 0}
        self._sender = sender
        self._most_waiting = most_waiting
        self._together = min(together, most_waiting)
        self._delay_s = delay_s
        self._now = now
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Item, int]] = deque()
        self._weight = 0
        self._wake = threading.Event()
        self._is_stopping = False
        self._is_failing = False
        self._under_way = 0
        self._told_at = -TELL_EVERY_S
        # A daemon: a send that hangs does not keep the process.
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many requests wait to be sent."""
        return self._weight

    def take(self, item: Item, weight: int = 1) -> None:
        """Have the spans of this be sent; dropped if there is no room. `weight`: as many requests it holds."""
        with self._lock:
            if self._weight + weight > self._most_waiting or self._is_stopping:
                reason: Reason = "stopped" if self._is_stopping else "queue_full"
            else:
                self._waiting.append((item, weight))
                self._weight += weight
                if self._weight >= self._together:
                    self._wake.set()
                return
        self._drop(reason, count_spans(item))
        if reason == "queue_full":
            self._tell(
                "The collector is slow: spans are dropped (%s), %d so far.", f"{self._most_waiting} requests wait"
            )

    def stop(self, limit_s: float = STOP_S) -> None:
        """Send what waits, for at most `limit_s`, then drop the rest. Blocks."""
        with self._lock:
            self._is_stopping = True
        self._wake.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            left = self._take_waiting(self._most_waiting)
            self._drop("stopped", self._under_way + sum(count_spans(item) for item in left))
        closing = threading.Thread(target=self._close, name="traces-end", daemon=True)
        closing.start()
        closing.join(limit_s / 4)

    def _close(self) -> None:
        try:
            self._sender.close()
        except Exception:
            log.debug("The exporter of traces was not closed", exc_info=True)

    def _drop(self, reason: Reason, spans: int) -> None:
        with self._lock:
            self.dropped[reason] += spans

    def _take_waiting(self, most: int) -> list[Item]:
        taken: list[Item] = []
        with self._lock:
            while self._waiting and len(taken) < most:
                item, weight = self._waiting.popleft()
                self._weight -= weight
                taken.append(item)
            if self._weight < self._together and not self._is_stopping:
                self._wake.clear()
        return taken

    def _run(self) -> None:
        while True:
            self._wake.wait(self._delay_s)
            is_last = self._is_stopping
            while items := self._take_waiting(self._together):
                self._send(items)
            if is_last:
                return

    def _send(self, items: Sequence[Item]) -> None:
        spans: list[Span] = []
        try:
            for item in items:
                spans += spans_of(item)
            self._under_way = len(spans)
            why = self._sender.send(spans)
        except Exception as error:  # a library, an address, a proxy: whatever it is, requests go on
            why = f"{type(error).__name__}: {error}"
        self._under_way = 0
        if why:
            self._drop("not_taken", len(spans) or sum(map(count_spans, items)))
            self._tell("The collector takes no traces (%s); %d spans are lost so far.", why)
            return
        self.sent += len(spans)
        if self._is_failing:
            self._is_failing = False
            log.info("The collector takes traces again; %d spans were lost", sum(self.dropped.values()))

    def _tell(self, sentence: str, why: str) -> None:
        now = self._now()
        self._is_failing = True
        if now - self._told_at >= TELL_EVERY_S:
            self._told_at = now
            lost = sum(self.dropped.values())
            log.warning(
                f"{sentence} Requests are answered all the same; OTEL_EXPORTER_OTLP_ENDPOINT names the collector",
                " ".join(why.split())[:300],
                lost,
            )


FAMILIES: tuple[tuple[str, Callable[[Exporter], Mapping[str, float]]], ...] = (
    ("marserve_spans_sent_total", lambda one: {"": one.sent}),
    ("marserve_spans_dropped_total", lambda one: {reason: float(spans) for reason, spans in one.dropped.items()}),
    ("marserve_traces_waiting", lambda one: {"": one.waiting}),
)
"""The families of the metrics page that show them, and where the numbers come from."""
