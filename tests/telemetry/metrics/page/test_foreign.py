"""What a collector of others may give: too much, or what Prometheus would refuse, costs its own families alone."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open

from marserve.telemetry.metrics.page.foreign import MAX_FAMILIES, MAX_SAMPLES, Collector, collected
from marserve.telemetry.metrics.page.registry import format_for

OPEN = format_for("application/openmetrics-text")
TEXT = format_for("")


class Giving:
    """A collector that gives these metrics."""

    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        """The metrics."""
        return self._metrics


def metric(kind: str, *samples: tuple[str, dict[str, str], float], name: str = "acme", text: str = "Acme.") -> Metric:
    """A family with these samples."""
    made = Metric(name, text, kind)
    for sample in samples:
        made.add_sample(*sample)
    return made


def test_whatever_the_library_measures_is_written() -> None:
    """All of its types, in OpenMetrics and in text."""
    registry = CollectorRegistry()
    Counter("a", "A.", ["x"], registry=registry).labels("1").inc()
    Gauge("b", "B.", registry=registry).set(-2)
    Histogram("c", "C.", registry=registry).observe(0.1)
    Summary("d", "D.", registry=registry).observe(0.1)
    Info("e", "E.", registry=registry).info({"version": "1"})

    opened = "".join(text for _, text in collected(registry, OPEN)) + "# EOF\n"

    assert [family.type for family in parse_open(opened)] == ["counter", "gauge", "histogram", "summary", "info"]
    assert "# TYPE e_info gauge" in "".join(text for _, text in collected(registry, TEXT))


def test_only_named_samples_are_written() -> None:
    """`name[]` goes for everything on the page."""
    registry = CollectorRegistry()
    Counter("a", "A.", registry=registry).inc()
    Gauge("b", "B.", registry=registry)

    [(_, text)] = collected(registry, TEXT, frozenset({"a_total"}))

    assert text == "# HELP a_total A.\n# TYPE a_total counter\na_total 1.0\n"


@pytest.mark.parametrize(
    ("collector", "said"),
    [
        (Giving(*[metric("gauge", name=f"g{index}") for index in range(MAX_FAMILIES + 1)]), "more than 1000 families"),
        (
            Giving(metric("gauge", *[("acme", {"n": str(index)}, 1.0) for index in range(MAX_SAMPLES + 1)])),
            "10001 samples",
        ),
        (Giving(metric("gauge", ("acme_total", {}, 1.0))), "which no gauge has"),
        (Giving(metric("gauge", ("acme", {"a": "1"}, 1.0), ("acme", {"a": "1"}, 2.0))), "two samples"),
        (Giving(metric("counter", ("acme_total", {}, -1.0))), "is never below 0"),
        (Giving(metric("counter", ("acme_total", {}, float("nan")))), "is never below 0"),
        (Giving(metric("gauge", text=" ")), "no sentence"),
    ],
    ids=["families", "samples", "suffix", "twice", "negative", "no number", "no text"],
)
def test_what_prometheus_would_refuse_is_said(collector: Collector, said: str) -> None:
    """A single bad sample costs a scrape."""
    with pytest.raises(Exception, match=said):
        collected(collector, OPEN)


def test_a_collector_that_never_ends_is_cut() -> None:
    """At the bound of families."""

    class Endless:
        def collect(self):  # type: ignore[no-untyped-def]
            number = 0
            while True:
                number += 1
                yield GaugeMetricFamily(f"g{number}", "G.", value=1)

    with pytest.raises(Exception, match="more than 1000 families"):
        collected(Endless(), TEXT)
