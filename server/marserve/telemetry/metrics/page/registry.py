"""The page's families as a registry of prometheus_client: the library judges names and formats by it.

Importing the library takes 14 ms, which a start does without: this module is imported with the first page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.page.families import Family
from marserve.telemetry.metrics.page.writer import exemplar_labels


class Families:
    """A collector of the library for families of ours. `read` gives those that are there."""

    def __init__(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """The families without their samples: the names that nothing else may have."""
        return [_head(family) for family in self._read()]

    def collect(self) -> Iterator[Metric]:
        """The families with the samples as they are now."""
        return (metric_of(family) for family in self._read())


def registry_of(read: Callable[[], Iterable[Family]]) -> CollectorRegistry:
    """A registry with these families. Raises ValueError where two of them claim one name."""
    registry = CollectorRegistry()
    registry.register(Families(read))  # type: ignore[arg-type]  # a protocol that the library's own do not inherit
    return registry


def metric_of(family: Family) -> Metric:
    """A family as the library has it, with the samples as they are now."""
    metric = _head(family)
    for values, value in family.rows():
        labels = dict(zip(family.labels, values, strict=True))
        if isinstance(value, Histogram):
            _add_histogram(metric, family.name, labels, value)
        else:
            metric.add_sample(family.name, labels, value)
    return metric


def _head(family: Family) -> Metric:
    return Metric(family.open_name, family.text, family.open_kind)


def _add_histogram(metric: Metric, name: str, labels: dict[str, str], histogram: Histogram) -> None:
    so_far = 0
    examples = histogram.examples or [None] * len(histogram.buckets)
    bounds = (*histogram.bounds, float("inf"))
    for bound, bucket, example in zip(bounds, histogram.buckets, examples, strict=True):
        so_far += bucket
        exemplar = None
        if example is not None and (its := exemplar_labels(example)):
            exemplar = Exemplar(its, example.value)
        its_labels = {**labels, "le": cast("str", floatToGoString(bound))}
        metric.add_sample(f"{name}_bucket", its_labels, so_far, exemplar=exemplar)
    metric.add_sample(f"{name}_count", labels, so_far)
    metric.add_sample(f"{name}_sum", labels, histogram.sum)
