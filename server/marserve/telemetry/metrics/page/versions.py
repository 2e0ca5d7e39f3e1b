"""marserve's families of versions and models: their counts, what their pools look like, what they used."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from marserve.telemetry.metrics.causes import by_known_cause
from marserve.telemetry.metrics.counts import HISTOGRAMS, Gauges, VersionMetrics
from marserve.telemetry.metrics.page.catalogue import CATALOGUE
from marserve.telemetry.metrics.page.families import Family, Row
from marserve.telemetry.metrics.page.views import ModelTotals, Read, VersionView

Views = Callable[[], Sequence[VersionView]]

# What a model used, by the names under which its totals are kept, and the values of the families' labels.
USAGE: Mapping[str, tuple[str, tuple[str, ...], Read]] = {
    "requests": ("marserve_usage_requests_total", (), lambda version: version.client_requests),
    "compute": ("marserve_usage_compute_seconds_total", (), lambda version: version.busy_seconds),
    "in": ("marserve_usage_bytes_total", ("in",), lambda version: version.input_bytes),
    "out": ("marserve_usage_bytes_total", ("out",), lambda version: version.answer_bytes),
}

_GAUGES: Mapping[str, Callable[[Gauges], float | None]] = {
    "marserve_queue_length": lambda gauges: gauges.queue_length,
    "marserve_queue_oldest_seconds": lambda gauges: gauges.oldest_s,
    "marserve_workers_target": lambda gauges: gauges.workers_target,
    "marserve_sequences": lambda gauges: gauges.sequences,
    "marserve_failing_workers": lambda gauges: gauges.failing,
    "marserve_worker_busy_ratio": lambda gauges: gauges.busy_ratio,
    "marserve_model_flops_utilisation": lambda gauges: gauges.flops_utilisation,
    "marserve_model_memory_bytes": lambda gauges: gauges.memory_bytes,
}

_PROCESSES: Mapping[str, str] = {
    "marserve_worker_cpu_seconds_total": "cpu_s",
    "marserve_worker_resident_bytes": "resident_bytes",
    "marserve_worker_proportional_bytes": "proportional_bytes",
}


def known(name: str, rows: Callable[[], Iterable[Row]]) -> Family:
    """The family of this name in the catalogue. Raises KeyError for a name that is not there."""
    meaning = CATALOGUE[name]
    return Family(name, meaning.kind, meaning.text, meaning.labels, rows)


def version_families(views: Views, totals: Mapping[str, ModelTotals]) -> Iterator[Family]:
    """The families of all versions that `views` gives. `totals` has those of their models."""
    for each in fields(VersionMetrics):
        if "family" in each.metadata:
            yield _of_field(views, each.name, **each.metadata)
    for name in HISTOGRAMS:
        yield known(name, _histograms(views, name))
    for name, read in _GAUGES.items():
        yield known(name, _gauge(views, read))
    yield known("marserve_workers", _workers(views, lambda gauges: gauges.workers))
    yield known("marserve_workers_computing", _workers(views, lambda gauges: gauges.computing))
    yield known("marserve_build_ratio", _build_ratios(views))
    yield known("marserve_traffic_share", _shares(views))
    yield known("marserve_model_flops_total", _flops(views))
    for name, figure in _PROCESSES.items():
        yield known(name, _processes(views, figure))
    for name in dict.fromkeys(family for family, _, _ in USAGE.values()):
        yield known(name, _usage(views, totals, name))


def _of_field(
    views: Views, name: str, family: str, label: str = "", read: Callable[[VersionMetrics], Any] | None = None
) -> Family:
    """The family that a field of `VersionMetrics` declares."""
    read = read or operator.attrgetter(name)
    if label == "cause":
        read = _by_cause(read)

    def numbers() -> list[Row]:
        return [(view.key, read(view.of)) for view in views()]

    def numbers_by_word() -> list[Row]:
        return [((*view.key, str(word)), count) for view in views() for word, count in read(view.of).items()]

    return known(family, numbers_by_word if label else numbers)


def _by_cause(read: Callable[[VersionMetrics], Any]) -> Callable[[VersionMetrics], Any]:
    return lambda version: by_known_cause(read(version))


def _histograms(views: Views, name: str) -> Callable[[], list[Row]]:
    return lambda: [row for view in views() for row in view.histograms(name)]


def _gauge(views: Views, read: Callable[[Gauges], float | None]) -> Callable[[], Iterator[Row]]:
    """A figure of each version's pool, left out where it is None. Pools are asked one after the other."""

    def rows() -> Iterator[Row]:
        for view in views():
            value = read(view.gauges)
            if value is not None:
                yield view.key, value

    return rows


def _workers(views: Views, read: Callable[[Gauges], Mapping[str, int]]) -> Callable[[], Iterator[Row]]:
    return lambda: (((*view.key, word), count) for view in views() for word, count in read(view.gauges).items())


def _build_ratios(views: Views) -> Callable[[], Iterator[Row]]:
    return lambda: (
        ((*view.key, *words), ratio) for view in views() for words, ratio in view.gauges.build_ratios.items()
    )


def _shares(views: Views) -> Callable[[], list[Row]]:
    def rows() -> list[Row]:
        asked = [(view.key, view.of.read_share) for view in views()]
        return [(key, read()) for key, read in asked if read is not None]

    return rows


def _flops(views: Views) -> Callable[[], Iterator[Row]]:
    """What all batches so far took, of versions whose FLOPs are counted."""

    def rows() -> Iterator[Row]:
        for view in views():
            flops, sizes = view.of.flops, view.of.batch_sizes
            if flops is not None:
                yield view.key, flops.of(sum(sizes.buckets), sizes.sum)

    return rows


def _processes(views: Views, figure: str) -> Callable[[], list[Row]]:
    """What the processes of each version's workers were last seen to use; nothing before the first look."""

    def rows() -> list[Row]:
        found = [(view.key, view.of.processes) for view in views()]
        values = [(key, getattr(its, figure)) for key, its in found if its is not None]
        return [(key, value) for key, value in values if value is not None]

    return rows


def _usage(views: Views, totals: Mapping[str, ModelTotals], family: str) -> Callable[[], list[Row]]:
    asked = [(name, words, read) for name, (its, words, read) in USAGE.items() if its == family]

    def rows() -> list[Row]:
        shown: list[Row] = []
        for name, words, read in asked:
            living: dict[str, float] = defaultdict(float)
            for view in views():
                living[view.of.model] += read(view.of)
            shown += [((model, *words), totals[model].never_falling(name, sum_)) for model, sum_ in living.items()]
        return shown

    return rows
