"""Two versions with given faults under given traffic, as counts that grow: what a judge is shown. Seeded, no clock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from marserve.registry.observing.arms import LATENCY_BOUNDS, Seen
from marserve.rollout.judge import Answers, Judge, Verdict

TICK_S = 0.5


def counts_of(latencies: Sequence[float]) -> tuple[int, ...]:
    """Latencies in seconds as `Seen` has them."""
    counts = [0] * (len(LATENCY_BOUNDS) + 1)
    for latency in latencies:
        counts[bisect_left(LATENCY_BOUNDS, latency)] += 1
    return tuple(counts)


@dataclass(frozen=True)
class Behaviour:
    """What a version does. Latencies are log-normal with this median and sigma, times `slowness`."""

    errors: float = 0.001
    rejections: float = 0.002
    median_s: float = 0.02
    sigma: float = 0.5
    slowness: float = 1.0
    differing: float = 0.0


class Growing:
    """The counts of one version, drawn tick by tick."""

    def __init__(self, behaviour: Behaviour, draw: numpy.random.Generator) -> None:
        self._behaviour = behaviour
        self._draw = draw
        self._latency = numpy.zeros(len(LATENCY_BOUNDS) + 1, dtype=int)
        self._seen = [0, 0, 0]

    def serve(self, requests: int) -> Seen:
        """So many requests more."""
        behaviour, draw = self._behaviour, self._draw
        errors = int(draw.binomial(requests, behaviour.errors))
        rejections = int(draw.binomial(requests - errors, behaviour.rejections))
        latencies = behaviour.median_s * behaviour.slowness * numpy.exp(behaviour.sigma * draw.normal(size=requests))
        numpy.add.at(self._latency, numpy.searchsorted(LATENCY_BOUNDS, latencies), 1)
        for index, more in enumerate((requests, errors, rejections)):
            self._seen[index] += more
        return Seen(*self._seen, tuple(map(int, self._latency)))


def play_step(
    judge: Judge,
    draw: numpy.random.Generator,
    candidate: Behaviour,
    baseline: Behaviour | None = None,
    *,
    per_s: float = 200,
    share: float = 0.25,
    hold_s: float = 30,
    most_s: float = 300,
    mirrored: float = 0.0,
    only_mirrored: bool = False,
) -> tuple[Verdict, Seen, Answers]:
    """One step until it is decided, or `most_s` is over: the last verdict, and what the candidate had done by then."""
    new, old = Growing(candidate, draw), Growing(baseline or Behaviour(), draw)
    compared = differing = 0
    elapsed_s = 0.0
    while True:
        elapsed_s += TICK_S
        count = int(draw.poisson(per_s * TICK_S))
        ours = 0 if only_mirrored else int(draw.binomial(count, share))
        seen, base = new.serve(ours), old.serve(count - ours)
        copies = int(draw.binomial(count - ours, mirrored))
        compared += copies
        differing += int(draw.binomial(copies, candidate.differing))
        answers = Answers(compared, differing)
        verdict = judge.look(elapsed_s, hold_s, base, seen, answers, only_mirrored=only_mirrored)
        if verdict.decision in ("roll back", "promote") or elapsed_s >= most_s:
            return verdict, seen, answers
