"""Our writer of metrics pages beside prometheus_client's: the same text, taken by its parsers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from marserve.machine.own_thread import in_own_thread
from marserve.telemetry.metrics.page.families import Family
from marserve.telemetry.metrics.page.foreign import ForeignCollectors, Source
from marserve.telemetry.metrics.page.registry import registry_of
from marserve.telemetry.metrics.page.writer import write
from marserve.telemetry.metrics.scrapes import Scrapes
from marserve.telemetry.metrics.server_metrics import Metrics

PAIR = re.compile(r'(\w+)="((?:\\.|[^"\\])*)"')


def canonical(page: str) -> list[str]:
    """The page's lines with each sample's labels in the order of their names: the library writes them so."""
    page = two_digits(page)
    return [line if line.startswith("#") else canonical_line(line) for line in page.split("\n")]


def two_digits(text: str) -> str:
    """The text with exponents as the library writes them since 0.26: before it wrote `1e+010`."""
    return re.sub(r"e\+0(\d\d)\b", r"e+\1", text)


def canonical_line(line: str) -> str:
    """One sample, its labels in order."""
    found = re.fullmatch(r"(\w+)\{((?:\w+=\"(?:\\.|[^\"\\])*\",?)*)\}( .*)", line, re.DOTALL)
    if found is None:
        return line
    pairs = sorted(PAIR.findall(found[2]))
    return f"{found[1]}{{{','.join(f'{name}={value!r}' for name, value in pairs)}}}{found[3]}"


def as_the_library_calls_it(page: str, families: Sequence[Family]) -> str:
    """The page in 0.0.4 with the type `untyped` for counters that OpenMetrics does not know as such."""
    for family in families:
        if family.open_kind == "unknown":
            page = page.replace(f"# TYPE {family.name} counter\n", f"# TYPE {family.name} untyped\n")
    return page


def assert_equal(families: Sequence[Family]) -> None:
    """Both writers say the same, and both parsers take it."""
    registry = registry_of(lambda: families)
    text, opened = write(families), write(families, is_open=True)

    assert canonical(as_the_library_calls_it(text, families)) == canonical(generate_latest(registry).decode())
    assert canonical(opened) == canonical(generate_open(registry).decode())
    assert len(list(parse_open(opened))) == len(families)
    assert len(list(parse_text(text))) == len(families)


def scrapes_of(metrics: Metrics, *sources: Source) -> Scrapes:
    """Pages of these metrics, with what these collect, in both formats."""
    return Scrapes(metrics, ForeignCollectors(sources, in_own_thread, fresh_s=0))
