"""Gives each request its place in a trace, and has the spans of those that are kept sent. On the event loop.

Every request has ids as soon as traces are on, since its handler and the services behind it want them at once. A
timeline from the beginning has only one whose trace is kept however it ends, whose caller has a trace, or that the
recorder wants; another one that turns out slow, or fails, gets it at its end. Spans are made at the end, for kept
requests only, on the exporter's thread.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from marserve.optional import reason, trouble
from marserve.telemetry.happenings import Happening, Kind
from marserve.telemetry.timeline import Timeline
from marserve.telemetry.trace_context import RANDOM, SAMPLED, Trace, draw_ids, find_parent, new_trace
from marserve.telemetry.traces.exporter import (
    DEFAULT_DELAY_S,
    DEFAULT_MOST_WAITING,
    DEFAULT_SENT_TOGETHER,
    Exporter,
    Sender,
)
from marserve.telemetry.traces.sampling import Sampling, read_sampling
from marserve.telemetry.traces.spans import EndedRequest, batches_of

log = logging.getLogger("marserve.traces")

Headers = Sequence[tuple[bytes, bytes]]

# What else the server does that is a span of its own.
SPANNED: Final[frozenset[Kind]] = frozenset(("load", "download", "eviction", "rollback"))
PROTOCOLS: Final = ("http/protobuf", "grpc")
# How much of a request's line is kept as long as the request is known.
MOST_CHARACTERS: Final = 256
# For so many requests ids are drawn at once.
DRAWN_TOGETHER: Final = 64
# What one number of OpenTelemetry's variables may be at most.
MOST_OF_A_VARIABLE: Final = 1_000_000


# A protocol: the recorder reads traces of timelines.
class Takes(Protocol):
    """Says which requests have a timeline, and takes those of requests that have ended; as `Recorder`."""

    left: float
    late_left: float
    refill_at: float
    slow_above_s: float
    always_above_s: float

    def begins(self, now: float) -> bool:
        """Whether a request that begins now has a timeline."""

    def refill(self, now: float) -> bool:
        """Let timelines be begun again, if it is time for that."""

    def take(self, timeline: Timeline) -> None:
        """A request has ended."""

    def take_late(self, timeline: Timeline) -> None:
        """A request that had no timeline was slow, or has failed."""


class Tracing:
    """The traces of a server. Requests that have ended go on to `recorder`."""

    def __init__(self, exporter: Exporter, sampling: Sampling, recorder: Takes | None = None) -> None:
        self.exporter = exporter
        self.share = sampling.share
        """Of the traces that begin here."""
        self._flags = sampling.flags
        self.below = sampling.below
        """A trace that begins here is kept whatever happens if bytes 8 to 16 of its ids are less."""
        self.ids: list[bytes] = []
        """Ids for traces that begin here, as `Trace` has them; if there are none `draw` brings more."""
        self._slower_than_s = sampling.slower_than_s or math.inf
        self.always_above_s = self._slower_than_s
        self._keeps = sampling.keeps
        self._recorder = recorder
        # As the recorder's, but for one: what failed or was slow is kept in any case.
        self.left = 0.0
        self.late_left = 1.0
        self.refill_at = -math.inf if recorder is not None else math.inf
        self.slow_above_s = self._slower_than_s

    def begins(self, _: float) -> bool:
        """A surface that makes no timelines late makes one of every request."""
        return True

    def refill(self, now: float) -> bool:
        """Let timelines be begun again, if it is time for that."""
        recorder = self._recorder
        if recorder is None or now < self.refill_at:
            return False
        recorder.refill(now)
        self.left, self.refill_at = recorder.left, recorder.refill_at
        self._look_at(recorder)
        return self.left > 0

    def _look_at(self, recorder: Takes) -> None:
        wanted_s = recorder.slow_above_s if recorder.late_left > 0 else math.inf
        self.slow_above_s = min(wanted_s, self._slower_than_s)

    def draw(self) -> bytes:
        """The ids of a trace that begins here."""
        if not self.ids:
            self.ids = draw_ids(DRAWN_TOGETHER)
        return self.ids.pop()

    def begin(self, lines: Headers, what: str, ids: bytes = b"") -> Trace:
        """The place of a request with these headers; without a `traceparent` they may be left out.

        `ids` are drawn already for a trace that begins here.
        """
        parent = find_parent(lines) if lines else None
        if parent is not None:
            return new_trace(parent, _bounded(what), self._flags)
        return self.of(ids or self.draw(), what)

    def of(self, ids: bytes, what: str) -> Trace:
        """The place of a request that began a trace of these ids."""
        flags = RANDOM | SAMPLED if ids[8:16] < self.below else RANDOM
        return Trace(ids.hex(), flags, "", False, "", _bounded(what))

    def take(self, timeline: Timeline) -> None:
        """A request that has a timeline has ended: have its spans sent, or not, and give it to the recorder."""
        trace = timeline.trace
        # Most requests are quick and well: they are told from the others here, without a call.
        if trace is not None and (
            trace.flags & SAMPLED
            or timeline.error
            or timeline.status >= 500
            or timeline.written_at - timeline.began > self._slower_than_s
        ):
            self._keep(timeline)
        recorder = self._recorder
        if recorder is not None and recorder.begins(timeline.written_at):
            recorder.take(timeline)
            self._look_at(recorder)
        else:
            self._hand_on_late(timeline)

    def take_late(self, timeline: Timeline) -> None:
        """A request that had no timeline was slow, or has failed."""
        self._keep(timeline)
        self._hand_on_late(timeline)

    def _hand_on_late(self, timeline: Timeline) -> None:
        recorder = self._recorder
        if recorder is None:
            timeline.parts = None
            return
        if recorder.late_left > 0 and (timeline.error or timeline.wall_s > timeline.of.slow_above_s):
            recorder.take_late(timeline)
        else:
            timeline.parts = None
        self._look_at(recorder)

    def _keep(self, timeline: Timeline) -> None:
        if self._keeps(timeline):
            parts = tuple(timeline.parts or ())  # the recorder may forget them before they are sent
            self.exporter.take(EndedRequest(timeline, parts, batches_of(timeline, parts)), 1 + len(parts))

    def note(self, happening: Happening) -> None:
        """Something else has happened; on any thread."""
        if happening.kind in SPANNED:
            self.exporter.take(happening)


def _bounded(what: str) -> str:
    return f"{what[:MOST_CHARACTERS]} " if len(what) > MOST_CHARACTERS else what


def open_tracing(
    share: float | None, slower_than_s: float, version: str, environment: Mapping[str, str]
) -> tuple[Exporter, Sampling] | None:
    """The exporter and the sampling that settings and variables ask for; None, with one line in the log, if none works.

    `share` None: as `OTEL_TRACES_SAMPLER` and its argument say.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        log.info("No traces are sent: OTEL_SDK_DISABLED is true")
        return None
    sampling, faults = read_sampling(share, slower_than_s, environment)
    protocol = (
        environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or PROTOCOLS[0]
    ).strip()
    if protocol not in PROTOCOLS:
        faults.append(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol[:100]!r}, and is ignored: it is {' or '.join(PROTOCOLS)}"
        )
        protocol = PROTOCOLS[0]
    most = _whole("OTEL_BSP_MAX_QUEUE_SIZE", DEFAULT_MOST_WAITING, environment, faults)
    together = _whole("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", DEFAULT_SENT_TOGETHER, environment, faults)
    delay_ms = _whole("OTEL_BSP_SCHEDULE_DELAY", int(DEFAULT_DELAY_S * 1000), environment, faults)
    for fault in faults:
        log.warning("%s", fault)
    try:
        sender: Sender = importlib.import_module("marserve.telemetry.traces.otlp").OtlpSender(
            protocol, version, environment
        )
    except ImportError as error:
        log.warning("No traces are sent: %s; pip install 'marserve[otlp]' brings it", trouble("otlp", error))
        return None
    except Exception as error:  # libraries, and what they read of the environment, may raise anything
        log.warning("No traces are sent: %s", reason(error))
        return None
    return Exporter(sender, most_waiting=most, together=together, delay_s=delay_ms / 1000), sampling


def _whole(name: str, default: int, environment: Mapping[str, str], faults: list[str]) -> int:
    word = environment.get(name, "").strip()
    if not word:
        return default
    if word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= MOST_OF_A_VARIABLE:
        return int(word[:9])
    faults.append(f"{name} is {word[:100]!r}, and is ignored: it is a whole number from 1 to {MOST_OF_A_VARIABLE}")
    return default
