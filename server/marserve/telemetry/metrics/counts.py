"""Counts events and writes the counts as a Prometheus page. It knows no HTTP, no pool and no clock.

The pool and the surfaces add to plain integers and lists: `VersionMetrics` belongs to one model version, `Metrics` to
the server. Most counts of a version declare the family that shows them. `pool/dispatch/dispatcher.py` adds a request
that was refused or waited too long. There are no locks, as everything runs on the event loop's thread. Text is made
only at a scrape. The constant part of each line is cached, and the whole block of a histogram until a value is added.

There are two sets of names. TorchServe's (`ts_…`, `Requests2XX`, `QueueTime`, …) keep its labels and its meaning,
gauges of "the last request" included. marserve's own are `marserve_…`. Series exist only for registered versions and
for fixed words, so no client can make new ones.

The definitions say which of TorchServe's metrics there are, with type and labels; most are read from the counts at
scrape time. Counts do not suffice for some definitions (a histogram of queue times) and for the modes that write lines:
then versions get a `Tap`, an observer of single events.
"""

# ruff: noqa: RUF009 - the calls beside the fields declare their families
from __future__ import annotations

import functools
import logging
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol

from marserve.messages import Metric
from marserve.telemetry.happenings import Happenings, Kind
from marserve.telemetry.metrics.handler_metrics import PREDICTION_TIME, ModelMetrics
from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.measurements import (
    FROM_EVENTS,
    HOST,
    ClassCounts,
    Event,
    Measurement,
    RequestCounts,
    Said,
    Tap,
)
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, Definition, Definitions
from marserve.telemetry.metrics.series import Series, labels
from marserve.telemetry.metrics.series import escape as _escape
from marserve.telemetry.metrics.series import number as _number
from marserve.telemetry.metrics.stages import StageSeconds
from marserve.telemetry.metrics.windows import Windows

log = logging.getLogger("marserve.telemetry")

Mode = Literal["log", "prometheus", "legacy"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

# TorchServe's page in the mode `legacy`; all other metrics are lines in that mode.
LEGACY_PAGE = frozenset(
    {"ts_inference_requests_total", "ts_inference_latency_microseconds", "ts_queue_latency_microseconds"}
)


class Gauges(NamedTuple):
    """The figures of a version's pool at a scrape.

    `workers` counts workers by state (`ready`, `loading`, …). `load_s` is how long each living worker's load took, by
    the worker's name as in logs (`W-9000-noop_1.0`). `workers_target` is how many there should be. `sequences` is how
    many are open, None for a model without them. `memory_bytes` is what its processes hold, None if it is not measured.
    """

    queue_length: int = 0
    workers: Mapping[str, int] = {}
    load_s: Mapping[str, float] = {}
    workers_target: int = 0
    sequences: int | None = None
    memory_bytes: int | None = None


def _count(family: str, text: str, kind: type[int] | type[float] = int) -> Any:
    """A field that the page shows as this family, one number a version."""
    return field(default=kind(), metadata={"family": family, "text": text})


def _by(label: str, family: str, text: str, read: Callable[[VersionMetrics], Mapping[str, int]] | None = None) -> Any:
    """A field of numbers by a word, the family's label; with `read` the page shows what that gives instead."""
    metadata = {"family": family, "text": text, "label": label, "read": read}
    return field(default_factory=lambda: defaultdict(int), metadata=metadata)


@dataclass(slots=True, eq=False)
class VersionMetrics:
    """The counts of one model version. Its pool adds to the attributes; they are read at scrape time.

    requests            accepted, before queueing; `named_requests` of them named this version in the URL,
                        `inner_requests` came from nodes of workflows, not from clients
    answers             by status, from the model or the server
    errors, refused     by cause (`x-marserve-cause`): after it was accepted; before (queue full, no worker, …)
    queue_seconds       arrival to being given to a worker; `named_queue_s` is what named requests have of its sum
    handler_seconds     inside the author's code, once a request (`observe(seconds, times=len(batch))`)
    total_seconds       arrival to answer; `named_total_s` as above
    stages              further stages of its requests, from first byte to last
    batch_sizes         requests a batch; `windows` samples these counts
    runs_by_size        batches that ended, and the seconds that they took together, by how many requests they had
    worker_starts       processes started; `worker_restarts` of them in the place of one that ended unasked
    worker_deaths       by cause
    worker_recycles     workers replaced because they had served long enough, by reason
    loads_on_demand     times that a request found the model asleep and had it loaded
    evictions           times that it was put to sleep to make room for another model
    retried             re-run because their worker died; `isolated`: re-run because their batch raised
    out_of_memory       batches that ran out of memory, of the host or of a device
    expired, cancelled  deadline passed; client gone
    batch_checks        certificates won or lost, by `passed` or `failed`
    batch_rechecks      served batches that were run again item by item; `batch_differences`: answered otherwise;
                        `recheck_seconds` is what workers took for it
    busy_seconds        in which workers ran batches for clients
    lengths             lengths of inputs, by where they came from: handler, cache, guess, or failed; `length_seconds`
                        is what workers took to say them
    shadow_mirrored     copies of requests that this version got as a shadow; `shadow_compared` answers were compared,
                        `shadow_differing` of them differed; `shadow_dropped` found no room, by reason; `shadow_errors`
                        were not answered or not compared, by cause
    expired_run         run though their deadline had passed before they were sent to a worker; it stays 0
    chosen              accepted requests that named no version, by why this one was chosen and not as the default:
                        `override`, `sticky`, `weight`
    read_gauges         asked at scrape time; `read_share`: which share of the requests that name no version it gets
    happenings          what `note` keeps, for explanations; None while the page does not have the version
    tap                 observer of single events; None if no metric needs it
    retired             what the page counts of it among its model's versions that went; None while it is shown
    """

    model: str
    version: str
    read_gauges: Callable[[], Gauges] = Gauges
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))
    handler_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))
    total_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))
    stages: StageSeconds = field(init=False)
    batch_sizes: Histogram = field(default_factory=lambda: Histogram(BATCH_BOUNDS))
    windows: Windows = field(default_factory=Windows)
    runs_by_size: dict[int, tuple[int, float]] = field(default_factory=dict)
    named_requests: int = 0
    inner_requests: int = 0
    named_queue_s: float = 0.0
    named_total_s: float = 0.0
    read_share: Callable[[], float] | None = None
    happenings: Happenings | None = None
    tap: Tap | None = None
    retired: tuple[object, int, Mapping[str, float]] | None = None

    # On the page in this order: first those that are one number, then those by a word.
    requests: int = _count("marserve_requests_total", "Accepted requests.")
    loads_on_demand: int = _count("marserve_loads_on_demand_total", "Times a request had a sleeping model loaded.")
    evictions: int = _count("marserve_evictions_total", "Times a model was put to sleep to make room for another.")
    retried: int = _count("marserve_retried_total", "Requests re-run because their worker died.")
    isolated: int = _count("marserve_isolated_total", "Requests re-run because their batch raised.")
    out_of_memory: int = _count("marserve_out_of_memory_total", "Batches that ran out of memory, host or device.")
    expired: int = _count("marserve_expired_total", "Requests whose deadline passed.")
    expired_run: int = _count("marserve_expired_run_total", "Requests run though their deadline had passed: none.")
    cancelled: int = _count("marserve_cancelled_total", "Requests whose client went away.")
    busy_seconds: float = _count("marserve_worker_busy_seconds_total", "Time in which workers ran batches.", float)
    recheck_seconds: float = _count(
        "marserve_batch_recheck_seconds_total", "Time in which workers ran served batches again.", float
    )
    batch_rechecks: int = _count("marserve_batch_rechecks_total", "Served batches that were run again item by item.")
    batch_differences: int = _count(
        "marserve_batch_differences_total", "Of those, batches that were not answered as their items alone."
    )
    length_seconds: float = _count(
        "marserve_length_seconds_total", "Time in which workers were asked how long inputs are.", float
    )
    shadow_mirrored: int = _count("marserve_shadow_mirrored_total", "Copies of requests sent to a shadow.")
    shadow_compared: int = _count("marserve_shadow_compared_total", "Answers of a shadow that were compared.")
    shadow_differing: int = _count("marserve_shadow_differing_total", "Of those, answers that differed.")
    worker_starts: int = _count("marserve_worker_starts_total", "Worker processes started.")
    worker_restarts: int = _count("marserve_worker_restarts_total", "Workers started in the place of one that ended.")
    answers: dict[int, int] = _by("status", "marserve_answers_total", "Answers by status.")
    errors: dict[str, int] = _by("cause", "marserve_errors_total", "Requests that failed, by cause.")
    refused: dict[str, int] = _by("cause", "marserve_model_refused_total", "Requests a model did not take, by cause.")
    worker_deaths: dict[str, int] = _by(
        "cause", "marserve_worker_deaths_total", "Workers that ended unasked, by cause."
    )
    chosen: dict[str, int] = _by(
        "reason", "marserve_traffic_requests_total", "Requests by why their version was chosen.", lambda v: v.reasons()
    )
    shadow_dropped: dict[str, int] = _by("reason", "marserve_shadow_dropped_total", "Copies without room, by reason.")
    shadow_errors: dict[str, int] = _by("cause", "marserve_shadow_errors_total", "Copies not answered or compared.")
    lengths: dict[str, int] = _by("source", "marserve_lengths_total", "Lengths of inputs, by where they came from.")
    batch_checks: dict[str, int] = _by(
        "verdict", "marserve_batch_checks_total", "Checks of batches against single requests."
    )
    worker_recycles: dict[str, int] = _by(
        "reason", "marserve_worker_recycles_total", "Workers replaced because they had served long enough, by reason."
    )

    def __post_init__(self) -> None:
        self.stages = StageSeconds(self.model, self.version, SECONDS_BOUNDS)

    def sample(self, now: float) -> None:
        """Keep the counts as they are now (monotonic), for the figures of the last minutes."""
        self.windows.sample(now, self)

    @property
    def default_requests(self) -> int:
        """Accepted requests that named no version."""
        return self.client_requests - self.named_requests

    def note(self, kind: Kind, now: float, text: str, *, seconds: float = 0.0) -> None:
        """Keep what has just happened to it, after so many seconds, for the explanations of requests."""
        if self.happenings is not None:
            self.happenings.note(kind, now - seconds, now, text, self.model, self.version)

    def reasons(self) -> dict[str, int]:
        """Accepted requests by why this version was chosen."""
        by_default = self.default_requests - sum(self.chosen.values())
        counts = {"path": self.named_requests, **self.chosen, "default": by_default}
        return {reason: count for reason, count in counts.items() if count > 0}

    @property
    def client_requests(self) -> int:
        """Accepted requests of clients: TorchServe's metric does not count those of a workflow's nodes."""
        return self.requests - self.inner_requests


# A protocol: `MetricsLog` is built upon these counts.
class LineLog(Protocol):
    """Writes measurements as lines."""

    def take(self, event: Event) -> None:
        """Take an event; never blocks."""

    def register(self, version: VersionMetrics) -> None:
        """Count this version's requests from now on."""

    def remove(self, version: VersionMetrics) -> None:
        """Stop counting this version's requests."""


class Metrics:
    """The server's metrics: those of its versions, of its listeners, of the machine, and what handlers measured.

    `hostname` is a label of TorchServe's metrics; `dropped_lines` returns how many lines each log has lost.
    `definitions` list TorchServe's metrics, `model_metrics` those of handlers. `mode` says what is on the page:
    everything (`prometheus`), TorchServe's three counters (`legacy`) or nothing (`log`); the rest goes to `lines`.
    """

    def __init__(
        self,
        hostname: str,
        dropped_lines: Callable[[], Mapping[str, int]] = dict,
        *,
        definitions: Definitions = BUILT_IN,
        model_metrics: ModelMetrics | None = None,
        mode: Mode = "prometheus",
        lines: LineLog | None = None,
    ) -> None:
        self.responses = [0] * 10
        self.happenings = Happenings()
        self._refused: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)
        self._dropped_lines = dropped_lines
        self._hostname = hostname
        self._versions: list[_VersionLines] = []
        self._by_default: dict[str, _DefaultTotals] = {}
        self._definitions = definitions
        models = self._model_metrics = model_metrics if model_metrics is not None else ModelMetrics(definitions)
        self._mode = mode
        self._lines = lines
        # Families that are fed update by update, by name: the machine's figures, handlers' values, and metrics for
        # which counts do not suffice.
        self._fed: dict[str, Series] = {}
        self._class_counts = ClassCounts()
        self._last_queue_s: float | None = None
        self._last_server_s: float | None = None
        self._last_handler_s: dict[str, float] = {}
        self._families: tuple[_Family, ...] = ()
        if mode != "log":
            self._families = tuple(
                family for family in self._declare_families() if mode == "prometheus" or family.name in LEGACY_PAGE
            )
        # The family of the detected `PredictionTime` appears with its first value, like all detected ones.
        self._detected_time = None if PREDICTION_TIME in definitions.model else models.known.get(PREDICTION_TIME)
        for text in misfits(definitions):
            log.warning("%s", text)
        # Whether single events go to `self._fed`.
        self._wants_events = bool(FROM_EVENTS & self._fed.keys())

    def declare(self, name: str, kind: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Show a further family of the whole server: `read` gives numbers by the values of a label.

        With the label "" there is one number, under the value "".
        """
        if self._mode == "prometheus":
            self._families = (*self._families, _of_server(name, kind, text, label, read))

    def register(self, version: VersionMetrics) -> None:
        """Show this version from now on. If it was removed before, its counts go on."""
        self._versions.append(_VersionLines(version))
        version.happenings = self.happenings
        self._by_default.setdefault(version.model, _DefaultTotals()).take_back(version)
        if self._lines is not None:
            self._lines.register(version)
            version.tap = Tap(version.model, version.version, self._lines.take)
        elif self._wants_events:
            version.tap = Tap(version.model, version.version, self._feed_event)

    def remove(self, version: VersionMetrics) -> None:
        """Stop showing this version. What belongs to its model goes with the model's last version."""
        if self._lines is not None:
            self._lines.remove(version)
        self._feed_counts()
        self._versions = [lines for lines in self._versions if lines.of is not version]
        if any(lines.of.model == version.model for lines in self._versions):
            self._by_default[version.model].retire(version)
            return
        self._by_default.pop(version.model, None)
        self._last_handler_s.pop(version.model, None)
        for series in self._fed.values():
            series.forget(version.model)

    def count_call(self, code: str) -> None:
        """Count a gRPC call that has ended, by the name of its status."""
        self._calls[code] += 1

    def count_refused(self, cause: str) -> None:
        """Count a refusal before a version was reached. `cause` is one of few fixed words, never a client's."""
        self._refused[cause] += 1

    def set_system(self, readings: Iterable[tuple[str, float, str | None]]) -> None:
        """Replace the machine's figures: TorchServe's name, value, and the device for figures of an accelerator."""
        for name in SYSTEM_METRICS:
            if (series := self._fed.get(name)) is not None and series.definition.kind == "gauge":
                series.clear()
        for name, value, device in readings:
            self._take(Measurement(name, HOST if device is None else (*HOST, device), [float(value)]))

    def update_front(self, metric: Metric) -> bool:
        """Take a figure of the operator's own program. False if no metric of that name and dimensions is listed."""
        definition = self._definitions.front.get(metric.name)
        if definition is None or len(metric.dimensions) + 1 != len(definition.dimensions):
            return False
        self._take(Measurement(metric.name, tuple([value for _, value in metric.dimensions]), [metric.value]))
        return True

    def update_custom(self, model: str, values: Iterable[Metric], dropped: int = 0) -> None:
        """Take values that a handler of `model` measured; its worker dropped `dropped` further ones.

        By TorchServe's rule, metrics are dropped that are not declared or whose dimensions do not fit the declaration.
        A handler's own `PredictionTime` is dropped too, as the server measures it.
        """
        self._model_metrics.dropped += max(0, dropped)
        for value in values:
            if value.name == PREDICTION_TIME:
                self._model_metrics.dropped += 1
                self._model_metrics.tell(model, value.name, "is measured by the server itself")
                continue
            fitting = self._model_metrics.fit(model, value)
            if fitting is None:
                continue
            if self._lines is not None:
                said = Measurement(value.name, fitting.values, [value.value], request_ids=value.request_ids)
                self._lines.take(Said(said))
                continue
            series = self._fed.get(value.name)
            if series is None and fitting.definition.fits_a_page:
                series = self._fed[value.name] = Series(fitting.definition, self._hostname)
                self._families += (self._fed_family(series),)
            if series is None:
                self._model_metrics.dropped += 1
                self._model_metrics.tell(model, value.name, "has a name or a dimension that Prometheus does not take")
            elif not series.update(fitting.values, value.value, owner=model):
                self._model_metrics.dropped += 1

    def _take(self, measurement: Measurement) -> None:
        if self._lines is not None:
            self._lines.take(Said(measurement))
        else:
            self._feed(measurement)

    def _feed_event(self, event: Event) -> None:
        for measurement in event.measurements():
            self._feed(measurement)

    def _feed(self, measurement: Measurement) -> None:
        series = self._fed.get(measurement.name)
        if series is None:
            return
        values = measurement.values
        for amount in measurement.amounts:
            series.update(values, amount, measurement.times, owner=values[0] if values else "")

    def _feed_counts(self) -> None:
        """Feed the answers and accepted requests that were counted since the last time."""
        if self._fed.keys() & {"Requests2XX", "Requests4XX", "Requests5XX"}:
            for measurement in self._class_counts.new(self.responses):
                self._feed(measurement)
        if "ts_inference_requests_total" in self._fed:
            for view in self._versions:
                for measurement in view.request_counts.new(view.of.client_requests, view.of.named_requests):
                    self._feed(measurement)

    def render(self, names: Sequence[str] = ()) -> bytes:
        """Write the page, or only the samples with exactly these names.

        As in TorchServe, families without samples appear, with their two comment lines, only on the whole page.
        """
        self._notice_last()
        self._feed_counts()
        try:
            return self._write(frozenset(names))
        finally:
            for view in self._versions:
                view.forget_gauges()

    def _write(self, wanted: frozenset[str]) -> bytes:
        out: list[str] = []
        for name, kind, text, collect in self._families:
            if not wanted:
                blocks = collect()
            elif wanted.isdisjoint(_sample_names(name, kind)):
                continue
            else:
                blocks = [line for block in collect() for line in block.split("\n") if _sample_name(line) in wanted]
                if not blocks:
                    continue
            out.append(f"# HELP {name} {text}\n# TYPE {name} {kind}")
            out += blocks
        return ("\n".join(out) + "\n").encode() if out else b""

    # -------------------------------------------------------------------------------- which families there are

    def _declare_families(self) -> Iterator[_Family]:
        for definition in (*self._definitions.front.values(), *self._definitions.model.values()):
            if not definition.fits_a_page:
                log.warning("Metric %s is not shown: Prometheus does not take its name or dimensions", definition.name)
                continue
            collect = self._collect_from_counts(definition)
            if collect is None:
                series = self._fed[definition.name] = Series(definition, self._hostname)
                yield self._fed_family(series)
            else:
                yield _Family(definition.name, definition.kind, _help(definition), collect)
        for each in fields(VersionMetrics):
            if each.metadata:
                yield self._of_field(each.name, **each.metadata)
        yield _Family(
            "marserve_request_seconds", "histogram", "Time of requests by stage: queue, handler, total.", self._seconds
        )
        yield _Family("marserve_batch_size", "histogram", "Requests in a batch.", self._batch_sizes)
        yield self._gauge("marserve_queue_length", "Requests that wait for a worker.", lambda g: g.queue_length)
        yield _Family("marserve_workers", "gauge", "Workers by state.", self._workers)
        yield self._gauge("marserve_workers_target", "Workers that there should be.", lambda g: g.workers_target)
        yield _Family(
            "marserve_traffic_share",
            "gauge",
            "Share of the requests naming no version that it gets, 0 to 1.",
            self._shares,
        )
        yield self._gauge("marserve_sequences", "Sequences that live.", lambda g: g.sequences, write=str)
        yield self._gauge(
            "marserve_model_memory_bytes",
            "Memory of a version's processes, by proportional set size; only with model_memory.",
            lambda g: g.memory_bytes,
            write=str,
        )
        for name, text, label, read_server in (
            ("marserve_http_responses_total", "Answers of all listeners, by class.", "class", self._by_class),
            ("marserve_grpc_calls_total", "Ended gRPC calls, by status code.", "code", lambda: self._calls),
            (
                "marserve_refused_total",
                "Refused before they reached a model, by cause.",
                "cause",
                lambda: self._refused,
            ),
            (
                "marserve_dropped_log_lines_total",
                "Log lines lost: not written, or too many.",
                "log",
                self._dropped_lines,
            ),
            (
                "marserve_dropped_metric_values_total",
                "Values from handlers that no declared metric fits.",
                "",
                lambda: {"": self._model_metrics.dropped},
            ),
        ):
            yield _of_server(name, "counter", text, label, read_server)

    def _fed_family(self, series: Series) -> _Family:
        definition = series.definition
        return _Family(definition.name, definition.kind, _help(definition), series.lines)

    # ---------------------------------------------------------------------------------- TorchServe's families

    def _collect_from_counts(self, definition: Definition) -> _Collect | None:
        """How to read a metric from the counts; None if it must be fed, or if its type or labels differ."""
        known = BUILT_IN.front.get(definition.name) or BUILT_IN.model.get(definition.name)
        if known is None or known.kind != definition.kind or len(known.dimensions) != len(definition.dimensions):
            return None
        name, names = definition.name, definition.dimensions
        if name in _CLASSES:
            return self._class(name, labels(names, (*HOST, self._hostname)), _CLASSES[name])
        if name in _ASKED:
            return self._by_version_asked_for(name, names, _ASKED[name])
        return {
            "QueueTime": lambda: self._of_last_request(name, names, self._last_queue_s),
            "WorkerThreadTime": lambda: self._of_last_request(name, names, self._last_server_s),
            "WorkerLoadTime": lambda: self._load_time(names),
            "PredictionTime": lambda: self._prediction_time(names),
        }.get(name)

    def _class(self, name: str, its_labels: str, first_digit: int) -> _Collect:
        def collect() -> list[str]:
            # TorchServe counts everything that is neither 2xx nor 4xx as 5XX, and dashboards rely on it.
            all_others = sum(self.responses) - self.responses[2] - self.responses[4]
            count = all_others if first_digit == 5 else self.responses[first_digit]
            return [f"{name}{{{its_labels}}} {_number(count)}"] if count else []

        return collect

    def _by_version_asked_for(
        self, name: str, names: Sequence[str], read: Callable[[VersionMetrics], tuple[float, float]]
    ) -> _Collect:
        """Lines by the version that requests named, or the word `default`."""

        def collect() -> list[str]:
            lines = []
            by_default: dict[str, float] = defaultdict(float)
            was_asked = {model for model, totals in self._by_default.items() if totals.requests}
            for view in self._versions:
                named, default = read(view.of)
                if view.of.named_requests:
                    lines.append(f"{name}{{{self._asked(names, view.of.model, view.of.version)}}} {_number(named)}")
                if view.of.default_requests:
                    was_asked.add(view.of.model)
                by_default[view.of.model] += default
            for model, living in by_default.items():
                value = self._by_default[model].never_falling(name, living)
                if model in was_asked:
                    lines.append(f"{name}{{{self._asked(names, model, 'default')}}} {_number(value)}")
            return lines

        return collect

    def _asked(self, names: Sequence[str], model: str, version: str) -> str:
        return labels(names, (model, version, self._hostname))

    def _notice_last(self) -> None:
        """Find the versions that were busy since the last scrape: they have the figures of "the last request"."""
        for view in self._versions:
            version, answered = view.of, view.of.total_seconds.count
            if answered == view.seen_answers:
                continue
            view.seen_answers = answered
            queue_s, handler_s = version.queue_seconds.last, version.handler_seconds.last
            self._last_queue_s = queue_s
            self._last_server_s = max(0.0, version.total_seconds.last - queue_s - handler_s)
            self._last_handler_s[version.model] = handler_s
        if self._last_handler_s and self._detected_time is not None and self._mode == "prometheus":
            definition, self._detected_time = self._detected_time, None
            collect = functools.partial(self._prediction_time, definition.dimensions)
            self._families += (_Family(definition.name, definition.kind, _help(definition), collect),)

    def _of_last_request(self, name: str, names: Sequence[str], seconds: float | None) -> list[str]:
        if seconds is None:
            return []
        return [f"{name}{{{labels(names, (*HOST, self._hostname))}}} {_number(int(seconds * 1000))}"]

    def _load_time(self, names: Sequence[str]) -> list[str]:
        return [
            f"WorkerLoadTime{{{labels(names, (worker, *HOST, self._hostname))}}} {_number(int(seconds * 1000))}"
            for view in self._versions
            for worker, seconds in view.gauges.load_s.items()
        ]

    def _prediction_time(self, names: Sequence[str]) -> list[str]:
        return [
            f"PredictionTime{{{labels(names, (model, 'Model', self._hostname))}}} {_number(round(seconds * 1000, 2))}"
            for model, seconds in self._last_handler_s.items()
        ]

    # ----------------------------------------------------------------------------------------------- our own

    def _of_field(
        self, name: str, family: str, text: str, label: str = "", read: Callable[[VersionMetrics], Any] | None = None
    ) -> _Family:
        """The family that a field of `VersionMetrics` declares."""
        read = read or operator.attrgetter(name)

        def numbers() -> list[str]:
            return [f"{family}{{{view.labels}}} {_number(read(view.of))}" for view in self._versions]

        def numbers_by_word() -> list[str]:
            return [
                f'{family}{{{view.labels},{label}="{_escape(str(word))}"}} {_number(count)}'
                for view in self._versions
                for word, count in read(view.of).items()
            ]

        return _Family(family, "counter", text, numbers_by_word if label else numbers)

    def _seconds(self) -> list[str]:
        return [block for view in self._versions for block in view.seconds_blocks()]

    def _batch_sizes(self) -> list[str]:
        return [view.batch_sizes.block() for view in self._versions]

    def _shares(self) -> list[str]:
        asked = [(view.labels, view.of.read_share) for view in self._versions]
        return [f"marserve_traffic_share{{{labels}}} {_number(read())}" for labels, read in asked if read is not None]

    def _gauge(
        self,
        name: str,
        text: str,
        read: Callable[[Gauges], float | None],
        write: Callable[[float], str] = _number,
    ) -> _Family:
        """A figure of each version's pool; None where there is no such figure."""

        def collect() -> list[str]:
            values = [(view.labels, read(view.gauges)) for view in self._versions]
            return [f"{name}{{{labels}}} {write(value)}" for labels, value in values if value is not None]

        return _Family(name, "gauge", text, collect)

    def _workers(self) -> list[str]:
        return [
            f'marserve_workers{{{view.labels},state="{_escape(state)}"}} {_number(count)}'
            for view in self._versions
            for state, count in view.gauges.workers.items()
        ]

    def _by_class(self) -> dict[str, int]:
        return {f"{digit}xx": count for digit, count in enumerate(self.responses) if count}


_Collect = Callable[[], list[str]]


class _Family(NamedTuple):
    """One metric, whose samples stand together on the page. `collect` returns lines, or blocks of them."""

    name: str
    kind: str
    text: str
    collect: _Collect


def _of_server(name: str, kind: str, text: str, label: str, read: Callable[[], Mapping[str, float]]) -> _Family:
    """A family of the whole server; see `Metrics.declare`."""

    def collect() -> list[str]:
        if not label:
            return [f"{name} {_number(number)}" for number in read().values()]
        return [f'{name}{{{label}="{_escape(word)}"}} {_number(number)}' for word, number in read().items()]

    return _Family(name, kind, text, collect)


_HELP = {
    "Requests2XX": "Answers of all listeners, by status class.",
    "Requests4XX": "Answers of all listeners, by status class.",
    "Requests5XX": "Answers of all listeners, by status class.",
    "ts_inference_requests_total": "Accepted inference requests.",
    "ts_inference_latency_microseconds": "Sum of the times to the answer, in microseconds.",
    "ts_queue_latency_microseconds": "Sum of the times in the queue, in microseconds.",
    "QueueTime": "Queue time of the last request, in milliseconds.",
    "WorkerThreadTime": "The server's own part of the last request, in ms.",
    "WorkerLoadTime": "How long the worker took to load, in milliseconds.",
    "PredictionTime": "The last batch's time in the model's handler, in ms.",
}

SYSTEM_METRICS = {
    "CPUUtilization": "Processor time in use, in percent.",
    "MemoryUsed": "Memory in use, in MiB.",
    "MemoryAvailable": "Memory that programs could still have, in MiB.",
    "MemoryUtilization": "Memory in use, in percent.",
    "DiskUsage": "Space in use on the root file system, in GiB.",
    "DiskAvailable": "Space left on the root file system, in GiB.",
    "DiskUtilization": "Space in use on the root file system, in percent.",
    "GPUMemoryUtilization": "Accelerator memory in use, in percent.",
    "GPUMemoryUsed": "Accelerator memory in use, in MiB.",
    "GPUUtilization": "Accelerator time in use, in percent.",
}


def _requests(version: VersionMetrics) -> tuple[float, float]:
    return version.named_requests, version.default_requests


def _total_us(version: VersionMetrics) -> tuple[float, float]:
    return _microseconds(version.named_total_s), _microseconds(version.total_seconds.sum - version.named_total_s)


def _queue_us(version: VersionMetrics) -> tuple[float, float]:
    return _microseconds(version.named_queue_s), _microseconds(version.queue_seconds.sum - version.named_queue_s)


_CLASSES = {"Requests2XX": 2, "Requests4XX": 4, "Requests5XX": 5}
_ASKED: Mapping[str, Callable[[VersionMetrics], tuple[float, float]]] = {
    "ts_inference_requests_total": _requests,
    "ts_inference_latency_microseconds": _total_us,
    "ts_queue_latency_microseconds": _queue_us,
}


def misfits(definitions: Definitions) -> Iterator[str]:
    """A sentence for each of the server's metrics whose dimensions in a metrics file do not fit its values."""
    for known in (*BUILT_IN.front.values(), *BUILT_IN.model.values()):
        definition = definitions.front.get(known.name) or definitions.model.get(known.name)
        if definition is not None and len(definition.dimensions) != len(known.dimensions):
            yield (
                f"Metric {known.name} gets no values: the metrics file gives it the dimensions "
                f"{list(definition.dimensions)}, and there are values for {list(known.dimensions)}"
            )


def _help(definition: Definition) -> str:
    known = BUILT_IN.front.get(definition.name) or BUILT_IN.model.get(definition.name)
    text = _HELP.get(definition.name) or SYSTEM_METRICS.get(definition.name)
    if text is not None and known is not None and known.kind == definition.kind:
        return text
    unit = " ".join(definition.unit.replace("\\", " ").split())
    return f"TorchServe's {definition.kind} {definition.name}, in {unit}." if text else f"Measured, in {unit}."


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class _DefaultTotals:
    """The totals of requests that named no version, over all versions of a model. They outlive its single versions."""

    def __init__(self) -> None:
        self.requests = 0
        self._retired: dict[str, float] = defaultdict(float)
        self._shown: dict[str, float] = defaultdict(float)

    def retire(self, version: VersionMetrics) -> None:
        counts = {name: read(version)[1] for name, read in _ASKED.items()}
        version.retired = self, version.default_requests, counts
        self._add(version.default_requests, counts, 1)

    def take_back(self, version: VersionMetrics) -> None:
        if version.retired is not None and version.retired[0] is self:
            self._add(version.retired[1], version.retired[2], -1)
        version.retired = None

    def _add(self, requests: int, counts: Mapping[str, float], sign: int) -> None:
        self.requests += sign * requests
        for name, count in counts.items():
            self._retired[name] += sign * count

    def never_falling(self, name: str, living: float) -> float:
        # A rounding error may make the difference of two sums smaller, which Prometheus takes for a restart from zero.
        value = self._shown[name] = max(self._shown[name], round(self._retired[name] + living, 3))
        return value


class _VersionLines:
    """The constant text of one version's lines."""

    def __init__(self, version: VersionMetrics) -> None:
        self.of = version
        self.request_counts = RequestCounts(version.model, version.version)
        self.request_counts.skip(version.client_requests, version.named_requests)
        self.seen_answers = 0
        self.labels = f'model="{_escape(version.model)}",version="{_escape(version.version)}"'
        self._gauges: Gauges | None = None
        self._seconds = {
            stage: self._lines_of(stage, histogram)
            for stage, histogram in (
                ("queue", version.queue_seconds),
                ("handler", version.handler_seconds),
                ("total", version.total_seconds),
            )
        }
        self.batch_sizes = _HistogramLines("marserve_batch_size", self.labels, version.batch_sizes)

    @property
    def gauges(self) -> Gauges:
        """The pool's figures, read once for each page."""
        if self._gauges is None:
            self._gauges = self.of.read_gauges()
        return self._gauges

    def forget_gauges(self) -> None:
        """Read the figures again for the next page."""
        self._gauges = None

    def seconds_blocks(self) -> list[str]:
        for stage, histogram in self.of.stages.by_stage.items():
            if stage not in self._seconds:
                self._seconds[stage] = self._lines_of(stage, histogram)
        return [lines.block() for lines in self._seconds.values()]

    def _lines_of(self, stage: str, histogram: Histogram) -> _HistogramLines:
        return _HistogramLines("marserve_request_seconds", f'{self.labels},stage="{stage}"', histogram)


class _HistogramLines:
    """A histogram's lines: the block is cached until a value is observed, and prefixes are kept from the first on.

    A server may have hundreds of models that were never asked: of those there is one text, once they were shown.
    """

    def __init__(self, name: str, labels: str, histogram: Histogram) -> None:
        self._name, self._labels = name, labels
        self._histogram = histogram
        self._prefixes: list[str] = []
        self._rendered_count = -1
        self._block = ""

    def block(self) -> str:
        histogram = self._histogram
        count = histogram.count
        if count == self._rendered_count:
            return self._block
        so_far = 0
        lines = []
        *of_buckets, of_sum, of_count = prefixes = self._prefixes or self._make_prefixes()
        if count:
            self._prefixes = prefixes
        for prefix, bucket in zip(of_buckets, histogram.buckets, strict=True):
            so_far += bucket
            lines.append(f"{prefix}{so_far}.0")
        lines.append(of_sum + _number(histogram.sum))
        lines.append(f"{of_count}{count}.0")
        self._rendered_count, self._block = count, "\n".join(lines)
        return self._block

    def _make_prefixes(self) -> list[str]:
        name, labels = self._name, self._labels
        les = [_number(bound) for bound in self._histogram.bounds] + ["+Inf"]
        buckets = [f'{name}_bucket{{{labels},le="{le}"}} ' for le in les]
        return [*buckets, f"{name}_sum{{{labels}}} ", f"{name}_count{{{labels}}} "]


def _sample_names(name: str, kind: str) -> tuple[str, ...]:
    return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if kind == "histogram" else (name,)


def _sample_name(line: str) -> str:
    return line.split("{", 1)[0].split(" ", 1)[0]
