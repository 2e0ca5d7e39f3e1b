"""Writes families as text: Prometheus' format 0.0.4, or OpenMetrics 1.0. Byte for byte what prometheus_client writes.

The exceptions: labels keep the family's order, TorchServe's counters without `_total` are counters in 0.0.4, and
OpenMetrics leaves out a sum that has become negative. The library makes an object of each sample, which costs more than
ten times as much (docs/adr/0017-our-own-writer-of-the-metrics-page.md).

Text is made in pieces that take well under a millisecond each. What has not changed since the last page is kept: the
text of many numbers together, the block of a histogram, and the part of a line before its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import cast

from marserve.telemetry.metrics.histogram import Example, Histogram
from marserve.telemetry.metrics.page.families import Family, Labels, Row

# So many lines, or histograms, are written at a time.
NUMBERS_AT_ONCE = 64
HISTOGRAMS_AT_ONCE = 4
# The most characters of names and values of an exemplar's labels together, by OpenMetrics.
MAX_EXEMPLAR = 128
# Ids without what would be escaped: the library's own parser refuses a page for an exemplar with a quote or a brace.
_PLAIN = re.compile(r"[^\"\\{}\n]+")
EOF = "# EOF\n"

_Numbers = list[tuple[Labels, float]]


class FamilyText:
    """The text of one family, as it was last written."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.headers = header_of(family, is_open=False), header_of(family, is_open=True)
        self._prefixes: dict[Labels, str] = {}
        self._chunks: list[tuple[_Numbers, str]] = []
        self._blocks: dict[Labels, _HistogramText] = {}

    def show_as_unknown(self) -> None:
        """Give the family the type `unknown` in OpenMetrics: another has its name there."""
        self.family = replace(self.family, is_unknown=True)
        self.headers = self.headers[0], header_of(self.family, is_open=True)

    def pieces(self, wanted: frozenset[str] = frozenset(), *, is_open: bool = False) -> Iterator[str]:
        """The family as text, a little at a time. `is_open` asks for OpenMetrics.

        With `wanted` only samples of these names are written, and nothing where none is left.
        """
        family = self.family
        if wanted and wanted.isdisjoint(family.sample_names):
            return
        header = self.headers[is_open]
        if not wanted:
            yield header
            header = ""
        if family.kind == "histogram":
            pieces = self._histograms(wanted, is_open=is_open)
        else:
            pieces = self._numbers()
        for piece in pieces:
            if piece:
                yield header + piece
                header = ""

    def _numbers(self) -> Iterator[str]:
        rows, chunks = iter(self.family.rows()), self._chunks
        written = 0
        while chunk := cast("_Numbers", list(islice(rows, NUMBERS_AT_ONCE))):
            if written < len(chunks) and chunks[written][0] == chunk:
                text = chunks[written][1]
            else:
                text = "".join([self._line(values, value) for values, value in chunk])
                chunks[written : written + 1] = [(chunk, text)]
            written += 1
            yield text
        del chunks[written:]
        if len(self._prefixes) > 2 * NUMBERS_AT_ONCE * (written + 1):
            self._prefixes.clear()  # of series that have gone, mostly

    def _line(self, values: Labels, value: float) -> str:
        prefix = self._prefixes.get(values)
        if prefix is None:
            family = self.family
            prefix = self._prefixes[values] = f"{family.name}{braced(family.labels, values)} "
        return f"{prefix}{number(value)}\n"

    def _histograms(self, wanted: frozenset[str], *, is_open: bool) -> Iterator[str]:
        rows = cast("Iterator[tuple[Labels, Histogram]]", iter(self.family.rows()))
        blocks, shown = self._blocks, 0
        while some := list(islice(rows, HISTOGRAMS_AT_ONCE)):
            shown += len(some)
            texts = []
            for values, histogram in some:
                block = blocks.get(values)
                if block is None or block.of is not histogram:
                    block = blocks[values] = _HistogramText(self.family, values, histogram)
                texts.append(block.text(is_open=is_open))
            text = "".join(texts)
            if wanted:
                text = "".join([line for line in text.splitlines(keepends=True) if _sample_name(line) in wanted])
            yield text
        if len(blocks) > 2 * shown + HISTOGRAMS_AT_ONCE:
            blocks.clear()


class _HistogramText:
    """A histogram's lines: kept until a value is observed, and their prefixes from the first value on.

    A server may have hundreds of models that were never asked: of those there is one text, once they were shown.
    """

    def __init__(self, family: Family, values: Labels, histogram: Histogram) -> None:
        self.of = histogram
        self._family, self._values = family, values
        self._prefixes: list[str] = []
        self._written_count = -1
        self._texts: list[str] = ["", ""]

    def text(self, *, is_open: bool) -> str:
        count = self.of.count
        if count != self._written_count:
            self._written_count, self._texts = count, ["", ""]
        which = int(is_open and (self.of.examples is not None or not self.of.sum >= 0))
        if not self._texts[which]:
            self._texts[which] = self._write(count, is_open=bool(which))
        return self._texts[which]

    def _write(self, count: int, *, is_open: bool) -> str:
        histogram = self.of
        *of_buckets, of_count, of_sum = prefixes = self._prefixes or self._make_prefixes()
        if count:
            self._prefixes = prefixes
        so_far = 0
        lines = []
        examples: Iterable[Example | None] = (histogram.examples if is_open else None) or [None] * len(of_buckets)
        for prefix, bucket, example in zip(of_buckets, histogram.buckets, examples, strict=True):
            so_far += bucket
            lines.append(f"{prefix}{number(so_far)}{exemplar(example)}\n" if example else f"{prefix}{number(so_far)}\n")
        if not is_open or histogram.sum >= 0:
            lines.append(f"{of_count}{number(count)}\n{of_sum}{number(histogram.sum)}\n")
        return "".join(lines)

    def _make_prefixes(self) -> list[str]:
        name, labels, values = self._family.name, self._family.labels, self._values
        bounds = [number(bound) for bound in (*self.of.bounds, float("inf"))]
        buckets = [f"{name}_bucket{braced((*labels, 'le'), (*values, bound))} " for bound in bounds]
        its = braced(labels, values)
        return [*buckets, f"{name}_count{its} ", f"{name}_sum{its} "]


def write(families: Iterable[Family], *, is_open: bool = False) -> str:
    """A whole page of these families, without anything kept."""
    pieces = [piece for family in families for piece in FamilyText(family).pieces(is_open=is_open)]
    return "".join(pieces) + (EOF if is_open else "")


def header_of(family: Family, *, is_open: bool) -> str:
    """The lines with the sentence and the type."""
    text = family.text.replace("\\", r"\\").replace("\n", r"\n")
    if not is_open:
        return f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n"
    text = text.replace('"', r"\"")
    return f"# HELP {family.open_name} {text}\n# TYPE {family.open_name} {family.open_kind}\n"


def braced(names: Sequence[str], values: Sequence[str]) -> str:
    """A sample's labels as they are written; nothing without labels."""
    if not names:
        return ""
    pairs = [f'{name}="{escape(value)}"' for name, value in zip(names, values, strict=True)]
    return f"{{{','.join(pairs)}}}"


def escape(text: str) -> str:
    """A label's value as it is written."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """A sample's value as it is written. From a million on the library writes an exponent, as Go does."""
    if 0 <= value < 1e6:
        return repr(float(value))
    text = repr(float(value))
    if value < 0 or (point := text.find(".")) < 0 or "e" in text:
        return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)
    digits = f"{text[0]}.{text[1:point]}{text[point + 1 :]}".rstrip("0.")
    return f"{digits}e+{point - 1:02d}"


def exemplar(example: Example) -> str:
    """What stands behind a bucket's number in OpenMetrics; nothing where the ids are too long for an exemplar."""
    labels = exemplar_labels(example)
    if not labels:
        return ""
    return f" # {braced(tuple(labels), tuple(labels.values()))} {number(example.value)}"


def exemplar_labels(example: Example) -> dict[str, str]:
    """The labels of an exemplar, by name: the request's and the trace's id, where they fit and are plain."""
    labels = {}
    room = MAX_EXEMPLAR
    for name, value in (("trace_id", example.trace_id), ("request_id", example.request_id)):
        if _PLAIN.fullmatch(value) and len(name) + len(value) <= room:
            labels[name] = value
            room -= len(name) + len(value)
    return dict(sorted(labels.items()))


def _sample_name(line: str) -> str:
    return line.split("{", 1)[0].split(" ", 1)[0]


__all__ = ["EOF", "FamilyText", "Row", "braced", "escape", "exemplar_labels", "header_of", "number", "write"]
