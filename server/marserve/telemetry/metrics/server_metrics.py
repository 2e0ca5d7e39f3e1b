"""The server's metrics: what all versions count, what listeners, the machine and handlers measured, and the page of it.

There are two sets of names. TorchServe's (`ts_…`, `Requests2XX`, `QueueTime`, …) keep its labels and its meaning,
gauges of "the last request" included. marserve's own are `marserve_…`. Series exist only for registered versions and
for fixed words, so no client can make new ones.

The definitions say which of TorchServe's metrics there are, with type and labels; most are read from the counts at
scrape time. Counts do not suffice for some definitions (a histogram of queue times) and for the modes that write lines:
then versions get a `Tap`, an observer of single events.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from marserve.messages import Metric
from marserve.telemetry.happenings import Happenings
from marserve.telemetry.metrics.causes import by_known_cause
from marserve.telemetry.metrics.counts import VersionMetrics
from marserve.telemetry.metrics.handler_metrics import PREDICTION_TIME, ModelMetrics
from marserve.telemetry.metrics.measurements import FROM_EVENTS, HOST, ClassCounts, Event, Measurement, Said, Tap
from marserve.telemetry.metrics.metric_definitions import BUILT_IN, Definitions
from marserve.telemetry.metrics.page.families import Family, Row
from marserve.telemetry.metrics.page.torchserve import (
    BY_DEFAULT,
    LEGACY_PAGE,
    SYSTEM_METRICS,
    TorchServeFamilies,
    family_of,
    misfits,
)
from marserve.telemetry.metrics.page.versions import USAGE, known, version_families
from marserve.telemetry.metrics.page.views import ModelTotals, Read, VersionView
from marserve.telemetry.metrics.page.writer import EOF, FamilyText
from marserve.telemetry.metrics.series import Series

log = logging.getLogger("marserve.telemetry")

Mode = Literal["log", "prometheus", "legacy"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_KEPT_OF_MODELS: Mapping[str, Read] = {**BY_DEFAULT, **{name: read for name, (_, _, read) in USAGE.items()}}


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
        self.mode = mode
        self.responses = [0] * 10
        self.happenings = Happenings()
        self._refused: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)
        self._dropped_lines = dropped_lines
        self._hostname = hostname
        self._versions: list[VersionView] = []
        self._totals: dict[str, ModelTotals] = {}
        self._keeps_examples = False
        self._definitions = definitions
        models = self._model_metrics = model_metrics if model_metrics is not None else ModelMetrics(definitions)
        self._lines = lines
        # Families that are fed update by update, by name: the machine's figures, handlers' values, and metrics for
        # which counts do not suffice.
        self._fed: dict[str, Series] = {}
        self._class_counts = ClassCounts()
        self._torchserve = TorchServeFamilies(hostname, self.views, self.responses, self._totals, self._fed)
        self._texts: list[FamilyText] = []
        self.names: frozenset[str] = frozenset()
        """All names that the families have on pages of either format."""
        if mode != "log":
            for family in (*self._torchserve.declare(definitions), *self._own_families()):
                if mode == "prometheus" or family.name in LEGACY_PAGE:
                    self._add(family)
        # The family of the detected `PredictionTime` appears with its first value, like all detected ones.
        self._detected_time = None if PREDICTION_TIME in definitions.model else models.known.get(PREDICTION_TIME)
        for text in misfits(definitions):
            log.warning("%s", text)
        self._preparing: list[Callable[[], None]] = []
        # Whether single events go to `self._fed`.
        self._wants_events = bool(FROM_EVENTS & self._fed.keys())

    # --------------------------------------------------------------------------------------- which families there are

    @property
    def families(self) -> list[Family]:
        """The families on the page, in its order."""
        return [text.family for text in self._texts]

    def views(self) -> Sequence[VersionView]:
        """The versions on the page."""
        return tuple(self._versions)

    def declare(self, name: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Show a further family of the whole server: `read` gives numbers by the values of its label.

        Where it has no label there is one number, under the value "". Raises KeyError for a name that is not in the
        catalogue.
        """
        self.declare_rows(name, _rows_of(read, has_label=bool(known(name, list).labels)))

    def declare_rows(self, name: str, rows: Callable[[], Iterable[Row]]) -> None:
        """Show a further family of the catalogue; `rows` as in `Family`."""
        family = known(name, rows)
        if self.mode == "prometheus" and not self._add(family):
            raise ValueError(f"{name} is on the metrics page already; declare it once")

    def _add(self, family: Family) -> bool:
        """Put a family on the page; False if its names are taken.

        OpenMetrics claims more names than 0.0.4 has: `jobs_total` is a counter `jobs` there, and a gauge `jobs` may
        stand beside it. Then the counter is one of unknown type there.
        """
        others = [text for text in self._texts if not text.family.claimed.isdisjoint(family.claimed)]
        if any(not text.family.text_names.isdisjoint(family.text_names) for text in others):
            return False
        for text in others:
            if family.is_true_counter:
                family = replace(family, is_unknown=True)
            if not text.family.claimed.isdisjoint(family.claimed):
                text.show_as_unknown()
        self._texts.append(FamilyText(family))
        self.names |= family.claimed | family.text_names
        return True

    def _own_families(self) -> Iterator[Family]:
        yield from version_families(self.views, self._totals)
        for name, read in (
            ("marserve_http_responses_total", self._by_class),
            ("marserve_grpc_calls_total", lambda: self._calls),
            ("marserve_refused_total", lambda: by_known_cause(self._refused)),
            ("marserve_dropped_log_lines_total", self._dropped_lines),
        ):
            yield known(name, _rows_of(read, has_label=True))
        yield known("marserve_dropped_metric_values_total", lambda: [((), self._model_metrics.dropped)])

    def _by_class(self) -> dict[str, int]:
        return {f"{digit}xx": count for digit, count in enumerate(self.responses) if count}

    # ---------------------------------------------------------------------------------------------- what is counted

    def register(self, version: VersionMetrics) -> None:
        """Show this version from now on. If it was removed before, its counts go on."""
        view = VersionView(version)
        if self._keeps_examples:
            view.keep_examples()
        self._versions.append(view)
        version.happenings = self.happenings
        self._totals.setdefault(version.model, ModelTotals(_KEPT_OF_MODELS)).take_back(version)
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
        self._versions = [view for view in self._versions if view.of is not version]
        if any(view.of.model == version.model for view in self._versions):
            self._totals[version.model].retire(version)
            return
        self._totals.pop(version.model, None)
        self._torchserve.forget(version.model)
        for series in self._fed.values():
            series.forget(version.model)

    def keep_examples(self) -> None:
        """Have histograms keep examples from now on: a page in OpenMetrics shows them."""
        if not self._keeps_examples:
            self._keeps_examples = True
            for view in self._versions:
                view.keep_examples()

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
                series = Series(fitting.definition, self._hostname)
                if not self._add(family_of(fitting.definition, series.rows)):
                    self._model_metrics.dropped += 1
                    self._model_metrics.tell(model, value.name, "has a name that another metric on the page has")
                    continue
                self._fed[value.name] = series
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

    # ----------------------------------------------------------------------------------------------------- the page

    def render(self, names: Sequence[str] = (), *, is_open: bool = False) -> bytes:
        """The families above as one page, written at once, or only the samples with exactly these names.

        `scrapes.py` writes it in steps, and adds what others collect.
        """
        pieces = [*self.pieces(frozenset(names), is_open=is_open), EOF if is_open else ""]
        return "".join(pieces).encode(errors="replace")

    def pieces(self, wanted: frozenset[str] = frozenset(), *, is_open: bool = False) -> Iterator[str]:
        """The page a little at a time, in 0.0.4 or in OpenMetrics without its end.

        The numbers of a family are those of the moment when its piece is written. As in TorchServe, families without
        samples appear, with their two comment lines, only on the whole page.
        """
        self.prepare()
        try:
            for text in tuple(self._texts):
                yield from text.pieces(wanted, is_open=is_open)
        finally:
            for view in self._versions:
                view.forget_gauges()

    def prepare_by(self, step: Callable[[], None]) -> None:
        """Take this short step on the event loop before families are read, too."""
        self._preparing.append(step)

    def prepare(self) -> None:
        """Bring what is not read from counts up to date, before families are read."""
        for step in self._preparing:
            step()
        self._torchserve.notice_last()
        if self._torchserve.has_handler_times and self._detected_time is not None and self.mode == "prometheus":
            definition, self._detected_time = self._detected_time, None
            self._add(self._torchserve.detected_time(definition))
        self._feed_counts()


def _rows_of(read: Callable[[], Mapping[str, float]], *, has_label: bool) -> Callable[[], list[Row]]:
    return lambda: [((word,) if has_label else (), number) for word, number in read().items()]
