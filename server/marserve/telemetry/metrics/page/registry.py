"""The page's families as a registry of prometheus_client, and the formats that the library chooses.

Importing the library takes 14 ms, which a start does without: this module is imported with the first page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.page.families import Family
from marserve.telemetry.metrics.page.writer import exemplar_labels, number

# Longer `Accept` headers are not read. Prometheus sends 300 characters.
MAX_ACCEPT: Final = 2000
_OPEN: Final = "application/openmetrics-text"
_KNOWN_VERSION: Final = re.compile(r"version=[12]\.0\.0(;|$)")


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
    registry.register(Families(read))
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
        its_labels = {**labels, "le": number(bound)}
        metric.add_sample(f"{name}_bucket", its_labels, so_far, exemplar=exemplar)
    metric.add_sample(f"{name}_count", labels, so_far)
    metric.add_sample(f"{name}_sum", labels, histogram.sum)


class Format(NamedTuple):
    """A format that a scrape asked for. `encode` is the library's writer of it, `parse` its reader."""

    content_type: str
    is_open: bool
    encode: Callable[[Collector], bytes]
    parse: Callable[[str], Iterable[Metric]]


def format_for(accept: str) -> Format:
    """The format that the library chooses for an `Accept` header; text 0.0.4 for one that makes no sense."""
    if len(accept) > MAX_ACCEPT:
        accept = ""
    try:
        encode, content_type = choose_encoder(accept)
    except TypeError:  # for a version that is no number
        encode, content_type = choose_encoder("")
    is_open = content_type.startswith(_OPEN)
    if is_open and not _KNOWN_VERSION.search(content_type):
        # The library repeats whatever version a client asks for.
        encode, content_type = choose_encoder(_OPEN)
    return Format(content_type, is_open, encode, parse_open if is_open else parse_text)
