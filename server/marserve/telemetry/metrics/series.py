"""A family of the Prometheus page that is fed update by update: counters, gauges and histograms by labels.

It is bounded, as a handler may take dimensions from requests. A series belongs to the owner that updated it last, and
is dropped with that owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.metrics.metric_definitions import Definition

MAX_SERIES = 1000

# The buckets of TorchServe's client library; histograms of handlers have these.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Series:
    """All series of one metric. `definition.dimensions` are their labels, the last of which is `hostname`."""

    def __init__(self, definition: Definition, hostname: str) -> None:
        self.definition = definition
        self._hostname = hostname
        self._numbers: dict[tuple[str, ...], float] = {}
        self._histograms: dict[tuple[str, ...], Histogram] = {}
        self._owners: dict[tuple[str, ...], str] = {}

    def update(self, values: Sequence[str], amount: float, times: int = 1, owner: str = "") -> bool:
        """Add, set or observe under these values of the dimensions. False: the update does not fit and is dropped.

        Dropped are another number of dimensions, a counter's value that is not at least 0, and series beyond the bound.
        """
        definition = self.definition
        if len(values) + 1 != len(definition.dimensions):
            return False
        key = (*values, self._hostname)
        if key not in self._owners and len(self._owners) >= MAX_SERIES:
            return False
        if definition.kind == "counter":
            if not amount >= 0:
                return False
            self._numbers[key] = self._numbers.get(key, 0.0) + amount * times
        elif definition.kind == "gauge":
            self._numbers[key] = amount
        else:
            if amount != amount:
                return False
            histogram = self._histograms.get(key)
            if histogram is None:
                histogram = self._histograms[key] = Histogram(BOUNDS)
            histogram.observe(amount, times)
        self._owners[key] = owner
        return True

    def forget(self, owner: str) -> None:
        """Drop the series that `owner` updated last."""
        for key in [key for key, its in self._owners.items() if its == owner]:
            del self._owners[key]
            self._numbers.pop(key, None)
            self._histograms.pop(key, None)

    def clear(self) -> None:
        """Drop all series."""
        self._owners.clear()
        self._numbers.clear()
        self._histograms.clear()

    def rows(self) -> list[tuple[tuple[str, ...], float | Histogram]]:
        """The values of the labels with their numbers, or their histograms."""
        return [*self._numbers.items(), *self._histograms.items()]
