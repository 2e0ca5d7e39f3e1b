"""What a collector of others may give: too much, or what Prometheus would refuse, costs its own families alone."""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Summary
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.samples import Exemplar

from marserve.machine.own_thread import in_own_thread
from marserve.telemetry.metrics.page.foreign import (
    MAX_FAMILIES,
    MAX_SAMPLES,
    WAIT_S,
    Collector,
    ForeignCollectors,
    Source,
    collected,
)
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


def with_exemplar(labels: dict[str, str]) -> Metric:
    """A counter with this exemplar."""
    made = Metric("acme", "Acme.", "counter")
    made.add_sample("acme_total", {}, 1.0, exemplar=Exemplar(labels, 1.0))
    return made


def without_type() -> Metric:
    """One whose author changed its type to what there is not."""
    made = metric("gauge", ("acme", {}, 1.0))
    made.type = "none"
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
        (Giving(metric("gauge", ("acme", {"a": "x" * (17 << 20)}, 1.0))), "longer than 16777216 characters"),
        (
            Giving(metric("histogram", ("acme_bucket", {"le": "1"}, 1.0))),
            "acme cannot be read: ValueError: [+]Inf bucket",
        ),
        (Giving(with_exemplar({"trace_id": "x" * 200})), "Exemplar labels are too long"),
        (Giving(with_exemplar({"trace_id": '"}'})), "acme cannot be read"),
        (Giving(without_type()), "Invalid metric type: none"),
    ],
    ids=[
        *("families", "samples", "suffix", "twice", "negative", "no number", "no text"),
        *("length", "no last bucket", "long exemplar", "exemplar with a quote", "no type"),
    ],
)
def test_what_prometheus_would_refuse_is_said(collector: Collector, said: str) -> None:
    """A single bad sample costs a scrape."""
    with pytest.raises(Exception, match=said):
        collected(collector, OPEN)


def test_a_part_of_a_histogram_can_be_asked_for() -> None:
    """Though what is left is none."""
    registry = CollectorRegistry()
    Histogram("c", "C.", registry=registry).observe(0.1)

    [(_, text)] = collected(registry, OPEN, frozenset({"c_sum"}))

    assert "c_sum 0.1" in text


def test_a_family_claims_the_name_that_it_is_written_with() -> None:
    """A reader that knows no dots in names gets another character, and would find the name twice."""
    [(names, text)] = collected(Giving(metric("counter", ("a.b_total", {}, 1.0), name="a.b")), TEXT)

    assert "a_b_total 1.0" in text
    assert {"a_b", "a_b_total"} <= names


class Unsaid(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("none")


@pytest.mark.parametrize(
    "error", [Unsaid(), StopIteration("x"), SystemExit(1), asyncio.CancelledError(), ValueError("x" * 9999)]
)
@pytest.mark.anyio
async def test_whatever_a_collector_raises_it_is_counted_and_said_in_short(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """The page comes without it, and at once."""

    class Raising:
        def collect(self) -> NoReturn:
            raise error

    source = Source("acme", "acme's", Raising())
    collectors = ForeignCollectors([source], in_own_thread)

    began = time.monotonic()
    assert [await collectors.write(OPEN, frozenset(), frozenset()) for _ in range(2)] == [[], []]

    assert time.monotonic() - began < WAIT_S
    assert source.failures == {"raised": 2}
    [said] = [record.getMessage() for record in caplog.records]
    assert type(error).__name__ in said
    assert len(said) < 500


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
