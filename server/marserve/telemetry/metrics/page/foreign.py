"""Collectors of others on the page: those of plug-ins, and what stands in prometheus_client's own registry.

Each is called in a thread of its own, at most once at a time and about once a second. Whatever it raises, gives or
takes of time, the page is written without it: after `WAIT_S` at the latest, and of what it gives only families that
Prometheus would not refuse the page for. What went wrong is counted by collector, and logged once for each reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from marserve.telemetry.metrics.page.families import Row, claimed_names
from marserve.telemetry.metrics.page.writer import EOF

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from marserve.telemetry.metrics.page.registry import Format

log = logging.getLogger("marserve.telemetry")

# How long a page waits for all collectors together.
WAIT_S: Final = 1.0
# For so long what a collector gave is shown again: pages that come faster do not call it.
FRESH_S: Final = 1.0
# The most samples of one collector on a page.
MAX_SAMPLES: Final = 10_000
# The most families of one collector on a page.
MAX_FAMILIES: Final = 1000
# The most characters of one collector on a page.
MAX_CHARACTERS: Final = 16 << 20
# The most characters of an error's sentence in the log.
MAX_SAID: Final = 300

_PLAIN_NAME: Final = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*").fullmatch

WHY: Final = ("raised", "slow", "too_many", "invalid", "clash")
"""Why something of a collector is missing: the label `why` of `marserve_collector_failures_total`."""

_NEVER_NEGATIVE = ("_total", "_count", "_bucket", "_sum", "_gcount")


class Collector(Protocol):
    """What prometheus_client calls a collector; its registries are such, too."""

    def collect(self) -> Iterable[Any]:
        """The families as they are now, as `prometheus_client.core.Metric` or one of its subclasses."""


class Written(NamedTuple):
    """One family as text, and the names that it claims on the page."""

    names: frozenset[str]
    text: str


RunInThread = Callable[[Callable[[], list[Written]], str], "asyncio.Future[list[Written]]"]


@dataclass(slots=True, eq=False)
class Source:
    """A collector, under the name that the label `collector` gives it. `origin` names it in the log."""

    name: str
    origin: str
    collector: Collector
    failures: Counter[str] = field(default_factory=Counter)
    call: asyncio.Future[list[Written]] | None = None
    kept: tuple[object, float, list[Written]] | None = None
    """For which page it was last written, when (monotonic), and what."""

    def failed(self, why: str, detail: str) -> None:
        """Count that something of it is missing, and log it the first time."""
        self.failures[why] += 1
        if self.failures[why] == 1:
            log.warning("The metrics page lacks what %s collects: %s (said once)", self.origin, detail)


class ForeignCollectors:
    """All collectors of others. `run` calls a function in a thread that the process's end does not wait for."""

    def __init__(
        self,
        sources: Sequence[Source],
        run: RunInThread,
        now: Callable[[], float] = monotonic,
        fresh_s: float = FRESH_S,
    ) -> None:
        self.sources = sources
        self._run = run
        self._now = now
        self._fresh_s = fresh_s

    def failures(self) -> list[Row]:
        """How often something of each collector was missing."""
        return [((source.name, why), count) for source in self.sources for why, count in source.failures.items()]

    async def write(self, form: Format, wanted: frozenset[str], taken: frozenset[str]) -> list[str]:
        """The text of what they collect, family by family. Names that are `taken` are left out.

        With `wanted` only samples of these names are there.
        """
        key, now = (form.content_type, wanted), self._now()
        calls = [self._kept(source, key, now) or self._begin(source, form, wanted) for source in self.sources]
        begun = [call for call in calls if call is not None and not call.done()]
        if begun:
            await asyncio.wait(begun, timeout=WAIT_S)
        texts: list[str] = []
        claimed = set(taken)
        for source, call in zip(self.sources, calls, strict=True):
            if call is None or not call.done():
                source.failed("slow", f"it takes more than {WAIT_S:g} s, or a call of it has not ended yet")
                continue
            source.call = None
            error = call.exception()
            if error is not None:
                why = error.why if isinstance(error, _Unfit) else "raised"
                source.failed(why, str(error) if isinstance(error, _Unfit) else _said(error))
                continue
            if source.kept is None or source.kept[2] is not call.result():
                source.kept = key, now, call.result()
            for names, text in call.result():
                if not claimed.isdisjoint(names):
                    source.failed("clash", f"{min(claimed & names)} is the name of another metric on the page")
                    continue
                claimed |= names
                texts.append(text)
        return texts

    def _kept(self, source: Source, key: object, now: float) -> asyncio.Future[list[Written]] | None:
        """What it gave for a page like this a moment ago; None where that is too old."""
        if source.kept is None or source.kept[0] != key or now - source.kept[1] >= self._fresh_s:
            return None
        kept: asyncio.Future[list[Written]] = asyncio.get_running_loop().create_future()
        kept.set_result(source.kept[2])
        return kept

    def _begin(self, source: Source, form: Format, wanted: frozenset[str]) -> asyncio.Future[list[Written]] | None:
        """Begin a call; None while the last one has not ended, so that a collector that hangs holds one thread."""
        if source.call is not None and not source.call.done():
            return None

        def collect() -> list[Written]:
            return collected(source.collector, form, wanted)

        source.call = self._run(collect, "metrics-collector")
        source.call.add_done_callback(_look_at)
        return source.call


class _Unfit(Exception):
    """What a collector gave cannot be shown."""

    def __init__(self, why: str, detail: str) -> None:
        super().__init__(detail)
        self.why = why


class _Listed:
    """Metrics for the library's writer, which asks a registry for them."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def collected(collector: Collector, form: Format, wanted: frozenset[str] = frozenset()) -> list[Written]:
    """Call a collector and write what it gives by the library. Raises what it raises, and for too much, or bad samples.

    Runs in a thread.
    """
    metrics: list[Metric] = list(islice(collector.collect(), MAX_FAMILIES + 1))
    if len(metrics) > MAX_FAMILIES:
        raise _Unfit("too_many", f"it gives more than {MAX_FAMILIES} families")
    samples = sum(len(metric.samples) for metric in metrics)
    if samples > MAX_SAMPLES:
        raise _Unfit("too_many", f"it gives {samples} samples, and at most {MAX_SAMPLES} are shown")
    found = []
    size = 0
    for metric in metrics:
        _check(metric)
        if wanted:
            metric.samples = [sample for sample in metric.samples if sample.name in wanted]
            if not metric.samples:
                continue
        text = form.encode(_Listed([metric])).decode()
        size += len(text)
        if size > MAX_CHARACTERS:
            raise _Unfit("too_many", f"its text is longer than {MAX_CHARACTERS} characters")
        names = claimed_names(metric.name, metric.type)
        # A part of a histogram is refused by readers that know what belongs to it.
        if not wanted and not _is_plain(metric):
            names |= _names_read(metric.name, text, form)
        found.append(Written(names, text.removesuffix(EOF)))
    return found


def _is_plain(metric: Metric) -> bool:
    """Whether every reader takes its text: reading a large family costs several times as much as writing it."""
    if metric.type not in ("gauge", "counter") or metric.unit or not _PLAIN_NAME(metric.name):
        return False
    return all(
        isinstance(sample.value, int | float) and sample.timestamp is None and sample.exemplar is None
        for sample in metric.samples
    )


def _names_read(name: str, text: str, form: Format) -> frozenset[str]:
    """The names that a reader of the page sees in the text of a family. Raises for a text that readers refuse.

    They are others than the family's where the format has not its characters: `a.b` is written as `a_b`.
    """
    try:
        return frozenset[str]().union(*(claimed_names(family.name, family.type) for family in form.parse(text)))
    except Exception as error:  # a parser's, which raises whatever a text leads to
        raise _Unfit("invalid", f"{name} cannot be read: {_said(error)}") from error


def _said(error: BaseException) -> str:
    """What an error of others says, whose class may be any."""
    try:
        words = str(error)
    except Exception:
        words = "it does not say what"
    return f"{type(error).__name__}: {words[:MAX_SAID]}"


def _check(metric: Metric) -> None:
    """Raise for a family for which Prometheus would refuse the whole page."""
    names = claimed_names(metric.name, metric.type)
    if not metric.documentation.strip():
        raise _Unfit("invalid", f"{metric.name} has no sentence (documentation)")
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for sample in metric.samples:
        if sample.name not in names:
            raise _Unfit("invalid", f"{metric.name} has a sample named {sample.name}, which no {metric.type} has")
        key = sample.name, tuple(sorted(sample.labels.items()))
        if key in seen:
            raise _Unfit("invalid", f"{sample.name} has two samples with the labels {sample.labels}")
        seen.add(key)
        if sample.name[len(metric.name) :] in _NEVER_NEGATIVE and (sample.value < 0 or math.isnan(sample.value)):
            raise _Unfit("invalid", f"{sample.name} is {sample.value}, and a counter is never below 0")


def _look_at(call: asyncio.Future[list[Written]]) -> None:
    """Retrieve the error of a call that no page waits for any more, so that asyncio does not log it."""
    if not call.cancelled():
        call.exception()
