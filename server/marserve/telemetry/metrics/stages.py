"""Histograms of the stages of a version's requests, beside those of its queue, its handler and the whole. Pure.

A stage gets its histogram with its first value: a server may have hundreds of models without a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, sub

from marserve.telemetry.metrics.histogram import Histogram
from marserve.telemetry.timeline import BatchTimes, Timeline

# For thousands of requests a second, without a step of Python for each.
_began, _body_at, _admitted_at = attrgetter("began"), attrgetter("body_at"), attrgetter("admitted_at")
_written_at, _last, _landed_at = attrgetter("written_at"), attrgetter("last"), attrgetter("last.landed_at")


class StageSeconds:
    """The histograms of a version by stage: names of `timeline.STAGES`, and `first_chunk`, `next_chunk` of streams."""

    __slots__ = ("_bounds", "_by_stage", "_is_over", "model", "slow_above_s", "version")

    def __init__(self, model: str, version: str, bounds: Sequence[float]) -> None:
        self.model, self.version = model, version
        self._bounds = bounds
        self.slow_above_s = 0.0
        self._by_stage: dict[str, Histogram] = {}
        self._is_over = False

    def end(self) -> None:
        """The version is gone: nothing is counted any more. Timelines that are kept of it would keep its histograms."""
        self._is_over = True
        self._by_stage = {}

    @property
    def by_stage(self) -> Mapping[str, Histogram]:
        """The stages that have a value."""
        return self._by_stage

    def observe(self, stage: str, seconds: float, times: int = 1) -> None:
        """Count a stage that took so long, `times` times. A negative time, which clocks may yield, counts as none."""
        if not self._is_over:
            self._histogram(stage).observe(max(0.0, seconds), times)

    def _histogram(self, stage: str) -> Histogram:
        histogram = self._by_stage.get(stage)
        if histogram is None:
            histogram = self._by_stage[stage] = Histogram(self._bounds)
        return histogram

    def observe_batch(self, times: BatchTimes) -> None:
        """Count the stages that the requests of a landed batch have in common, if its worker has told of its work."""
        work = times.work
        if work is None or self._is_over:
            return
        begins_at, size = times.begins_at, times.size
        own_s = work.decode_s + times.handler_s + work.encode_s
        if work.began:
            self.observe("send", work.began - begins_at, size)
            self.observe("return", times.landed_at - work.began - own_s, size)
        else:
            self.observe("send", times.landed_at - begins_at - own_s, size)
        self.observe("decode", work.decode_s, size)
        self.observe("encode", work.encode_s, size)

    def observe_ended(self, ended: Sequence[Timeline]) -> None:
        """Count the stages that each of these requests has by itself: together they cost a third of one by one."""
        if self._is_over:
            return
        if any(map(_body_at, ended)):
            for timeline in ended:
                if timeline.body_at:  # it came in pieces
                    head_at = timeline.head_at or timeline.began
                    self.observe("header", head_at - timeline.began)
                    self.observe("body", timeline.body_at - head_at)
            ready_at = [timeline.body_at or timeline.began for timeline in ended]
        else:
            ready_at = list(map(_began, ended))
        self._histogram("admit").observe_all(list(map(sub, map(_admitted_at, ended), ready_at)))
        answered = ended if all(map(_last, ended)) and all(map(_landed_at, ended)) else _answered(ended)
        if answered:
            self._histogram("write").observe_all(list(map(sub, map(_written_at, answered), map(_landed_at, answered))))


def _answered(ended: Sequence[Timeline]) -> Sequence[Timeline]:
    return [timeline for timeline in ended if timeline.last is not None and timeline.last.landed_at]
