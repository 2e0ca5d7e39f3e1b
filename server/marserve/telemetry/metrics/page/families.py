"""A family of the metrics page. Pure: its numbers are read only when the page is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from marserve.telemetry.metrics.histogram import Histogram

Labels = tuple[str, ...]
Row = tuple[Labels, "float | Histogram"]

# What the samples of a type are named behind the family's name, as the library sees it.
_SUFFIXES = {
    "counter": ("_total", "_created"),
    "summary": ("_sum", "_count", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "gaugehistogram": ("_bucket", "_gsum", "_gcount"),
    "info": ("_info",),
}


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric, whose samples stand together on the page.

    `kind` is `counter`, `gauge` or `histogram`. `rows` gives the values of `labels`, in their order, each with a number
    or, in a histogram, with a `Histogram`. It is read in steps between which the event loop runs, so it must not go
    over a collection that may change meanwhile. `is_unknown`: OpenMetrics has no counter of its name on this page,
    where another family has the name without `_total`.
    """

    name: str
    kind: str
    text: str
    labels: Labels
    rows: Callable[[], Iterable[Row]]
    is_unknown: bool = False

    @property
    def is_true_counter(self) -> bool:
        """Whether it can be a counter in OpenMetrics. TorchServe has counters that end in no `_total`."""
        return self.kind == "counter" and self.name.endswith("_total") and not self.is_unknown

    @property
    def open_kind(self) -> str:
        """Its type in OpenMetrics."""
        return "unknown" if self.kind == "counter" and not self.is_true_counter else self.kind

    @property
    def open_name(self) -> str:
        """Its name in OpenMetrics, where the samples of a counter have the ending `_total`, and the counter has not."""
        return self.name.removesuffix("_total") if self.is_true_counter else self.name

    @property
    def sample_names(self) -> frozenset[str]:
        """What its samples are named."""
        if self.kind == "histogram":
            return frozenset((f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count"))
        return frozenset((self.name,))

    @property
    def text_names(self) -> frozenset[str]:
        """The names that it has in 0.0.4."""
        return self.sample_names | {self.name}

    @property
    def claimed(self) -> frozenset[str]:
        """The names that no other family may have on a page in OpenMetrics."""
        return claimed_names(self.open_name, self.open_kind)


def claimed_names(open_name: str, open_kind: str) -> frozenset[str]:
    """The names that a family of OpenMetrics has for itself: a page on which two families claim one is refused."""
    return frozenset((open_name, *(open_name + suffix for suffix in _SUFFIXES.get(open_kind, ()))))
