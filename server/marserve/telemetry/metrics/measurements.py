"""Events of requests, as updates of TorchServe's metrics. Pure: no files, no page, no clock, no state.

A `Tap` is an observer of a version's events. It exists only if single events are needed: in the modes that write lines,
or if a metrics file gives a metric of the server another type than the counts provide. It makes one small tuple a batch
on the event loop; the receiver of the tuple computes the `measurements` elsewhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

HOST = ("Host",)
ONCE = (1.0,)
DEFAULT_VERSION = "default"


class Measurement(NamedTuple):
    """Updates of one series by these amounts, each `times` times over.

    `values` are those of the dimensions without the host's.
    """

    name: str
    values: tuple[str, ...]
    amounts: Sequence[float]
    times: int = 1
    request_ids: str = ""


class Queued(NamedTuple):
    """Requests left the queue after these seconds; `named_s` are those of requests that had named their version."""

    model: str
    version: str
    waits_s: Sequence[float]
    named_s: Sequence[float]

    def measurements(self) -> Iterator[Measurement]:
        """Their queue times, in whole milliseconds and in microseconds."""
        yield Measurement("QueueTime", HOST, [float(int(wait * 1000)) for wait in self.waits_s])
        yield from _latencies("ts_queue_latency_microseconds", self.model, self.version, self.waits_s, self.named_s)


class Answered(NamedTuple):
    """Requests were answered after these seconds."""

    model: str
    version: str
    totals_s: Sequence[float]
    named_s: Sequence[float]

    def measurements(self) -> Iterator[Measurement]:
        """Their latencies, in microseconds."""
        yield from _latencies(
            "ts_inference_latency_microseconds", self.model, self.version, self.totals_s, self.named_s
        )


class Ran(NamedTuple):
    """A worker ran a batch; `server_s` is the server's own part of the time."""

    model: str
    request_ids: Sequence[str]
    handler_s: float
    server_s: float

    def measurements(self) -> Iterator[Measurement]:
        """The batch's two times, in milliseconds."""
        yield Measurement("WorkerThreadTime", HOST, [self.server_ms])
        yield self.prediction_time

    @property
    def server_ms(self) -> float:
        """The server's part, in whole milliseconds; a clock's jitter makes no negative time."""
        return float(int(max(0.0, self.server_s) * 1000))

    @property
    def prediction_time(self) -> Measurement:
        """The handler's part, with the ids of its requests."""
        handler_ms = round(self.handler_s * 1000, 2)
        return Measurement("PredictionTime", (self.model, "Model"), [handler_ms], 1, ",".join(self.request_ids))


class WorkerLoaded(NamedTuple):
    """A worker has loaded its model."""

    worker: str
    seconds: float

    def measurements(self) -> Iterator[Measurement]:
        """How long it took."""
        yield Measurement("WorkerLoadTime", (self.worker, "Host"), [float(int(self.seconds * 1000))])


class Said(NamedTuple):
    """A single update that was computed elsewhere."""

    measurement: Measurement

    def measurements(self) -> Iterator[Measurement]:
        """That update."""
        yield self.measurement


Event = Queued | Answered | Ran | WorkerLoaded | Said

FROM_EVENTS = frozenset(
    {
        "QueueTime",
        "ts_queue_latency_microseconds",
        "ts_inference_latency_microseconds",
        "WorkerThreadTime",
        "PredictionTime",
        "WorkerLoadTime",
    }
)
"""Metrics whose single updates come from a tap; `Requests…` and `ts_inference_requests_total` come from counts."""


def measurements_of(events: Iterable[Event]) -> Iterator[Measurement]:
    """The measurements of many events, those of one series together, so that each costs little."""
    queued: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(_two_lists)
    answered: dict[tuple[str, str], tuple[list[float], list[float]]] = defaultdict(_two_lists)
    server_ms: list[float] = []
    for event in events:
        if isinstance(event, Queued | Answered):
            model, version, seconds, named_s = event
            all_s, all_named_s = (queued if isinstance(event, Queued) else answered)[model, version]
            all_s += seconds
            all_named_s += named_s
        elif isinstance(event, Ran):
            server_ms.append(event.server_ms)
            yield event.prediction_time
        else:
            yield from event.measurements()
    for (model, version), (waits_s, named_s) in queued.items():
        yield from Queued(model, version, waits_s, named_s).measurements()
    for (model, version), (totals_s, named_s) in answered.items():
        yield from Answered(model, version, totals_s, named_s).measurements()
    if server_ms:
        yield Measurement("WorkerThreadTime", HOST, server_ms)


def _two_lists() -> tuple[list[float], list[float]]:
    return [], []


class Tap:
    """Passes the events of one version to `take`, on the event loop; `take` must be quick."""

    __slots__ = ("_model", "_take", "_version")

    def __init__(self, model: str, version: str, take: Callable[[Event], None]) -> None:
        self._model, self._version, self._take = model, version, take

    def queued(self, waits_s: Sequence[float], named_s: Sequence[float]) -> None:
        """A batch went to a worker."""
        self._take(Queued(self._model, self._version, waits_s, named_s))

    def answered(self, totals_s: Sequence[float], named_s: Sequence[float]) -> None:
        """Requests were answered."""
        if totals_s:
            self._take(Answered(self._model, self._version, totals_s, named_s))

    def ran(self, request_ids: Sequence[str], handler_s: float, server_s: float) -> None:
        """A worker ran a batch."""
        if request_ids:
            self._take(Ran(self._model, request_ids, handler_s, server_s))

    def loaded(self, worker: str, seconds: float) -> None:
        """A worker has loaded its model."""
        self._take(WorkerLoaded(worker, seconds))


class ClassCounts:
    """Makes updates of the counts of answers, by the first digit of their status, since the last reading."""

    def __init__(self) -> None:
        self._told = {"Requests2XX": 0, "Requests4XX": 0, "Requests5XX": 0}

    def new(self, responses: Sequence[int]) -> Iterator[Measurement]:
        """The updates since then. As in TorchServe, all that is neither 2xx nor 4xx counts as 5XX."""
        now = responses[2], responses[4], sum(responses) - responses[2] - responses[4]
        for name, count in zip(self._told, now, strict=True):
            if count > self._told[name]:
                yield Measurement(name, HOST, ONCE, count - self._told[name])
                self._told[name] = count


class RequestCounts:
    """Makes updates of the count of accepted requests of one version, since the last reading."""

    def __init__(self, model: str, version: str) -> None:
        self._model = model
        self._told = {version: 0, DEFAULT_VERSION: 0}
        self._version = version

    def skip(self, requests: int, named_requests: int) -> None:
        """Leave out requests that were reported elsewhere."""
        self._told = {self._version: named_requests, DEFAULT_VERSION: requests - named_requests}

    def new(self, requests: int, named_requests: int) -> Iterator[Measurement]:
        """The updates since then. The two numbers may be read at slightly different times; nothing is counted twice."""
        for word, count in ((self._version, named_requests), (DEFAULT_VERSION, requests - named_requests)):
            if count > self._told[word]:
                yield Measurement("ts_inference_requests_total", (self._model, word), ONCE, count - self._told[word])
                self._told[word] = count


def _latencies(
    name: str, model: str, version: str, seconds: Sequence[float], named_s: Sequence[float]
) -> Iterator[Measurement]:
    if named_s:
        yield Measurement(name, (model, version), [round(value * 1e6, 3) for value in named_s])
        left = Counter(seconds)
        left.subtract(named_s)
        seconds = list(left.elements())
    if seconds:
        yield Measurement(name, (model, DEFAULT_VERSION), [round(value * 1e6, 3) for value in seconds])
