"""A version as the page shows it, and the totals of a model, which outlive its versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from marserve.telemetry.metrics.counts import HISTOGRAMS, PADDING_FAMILY, STAGES_FAMILY, Gauges, VersionMetrics
from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.measurements import RequestCounts
from marserve.telemetry.metrics.page.families import Labels


class VersionView:
    """One version on the page. `key` has the values of its labels `model` and `version`."""

    def __init__(self, version: VersionMetrics) -> None:
        self.of = version
        self.key: Labels = (version.model, version.version)
        self.request_counts = RequestCounts(*self.key)
        self.request_counts.skip(version.client_requests, version.named_requests)
        self.seen_answers = 0
        self._histograms: Mapping[str, list[tuple[Labels, Histogram]]] = {
            family: [((*self.key, *words), getattr(version, name)) for name, words in fields]
            for family, fields in HISTOGRAMS.items()
        }
        self._known_stages = 0
        self._gauges: Gauges | None = None

    @property
    def gauges(self) -> Gauges:
        """The pool's figures, read once for each page."""
        if self._gauges is None:
            self._gauges = self.of.read_gauges()
        return self._gauges

    def forget_gauges(self) -> None:
        """Read the figures again for the next page."""
        self._gauges = None

    def histograms(self, family: str) -> list[tuple[Labels, Histogram]]:
        """Its histograms of a family, with the values of their labels; that of padding only where it has any."""
        if family == PADDING_FAMILY and not any(self.of.padding.buckets):
            return []
        rows = self._histograms[family]
        if family == STAGES_FAMILY and len(self.of.stages.by_stage) > self._known_stages:
            new = list(self.of.stages.by_stage.items())[self._known_stages :]
            rows += [((*self.key, stage), histogram) for stage, histogram in new]
            self._known_stages += len(new)
        return rows

    def keep_examples(self) -> None:
        """Have its histograms keep examples from now on; those of stages beside queue, handler and total have none."""
        for rows in self._histograms.values():
            for _, histogram in rows:
                histogram.keep_examples()


Read = Callable[[VersionMetrics], float]


class ModelTotals:
    """The totals of a model's requests over all its versions, those that went included. `reads` reads one version's."""

    def __init__(self, reads: Mapping[str, Read]) -> None:
        self.requests = 0
        self._reads = reads
        self._retired: dict[str, float] = defaultdict(float)
        self._shown: dict[str, float] = defaultdict(float)

    def retire(self, version: VersionMetrics) -> None:
        """Keep the counts of a version that goes."""
        counts = {name: read(version) for name, read in self._reads.items()}
        version.retired = self, version.default_requests, counts
        self._add(version.default_requests, counts, 1)

    def take_back(self, version: VersionMetrics) -> None:
        """A version is there again: its counts are its own."""
        if version.retired is not None and version.retired[0] is self:
            self._add(version.retired[1], version.retired[2], -1)
        version.retired = None

    def _add(self, requests: int, counts: Mapping[str, float], sign: int) -> None:
        self.requests += sign * requests
        for name, count in counts.items():
            self._retired[name] += sign * count

    def never_falling(self, name: str, living: float) -> float:
        """The total under this name: what went, and what the living versions have."""
        # A rounding error may make the difference of two sums smaller, which Prometheus takes for a restart from zero.
        value = self._shown[name] = max(self._shown[name], round(self._retired[name] + living, 3))
        return value
