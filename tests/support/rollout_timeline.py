"""Draws how roll-outs go, by playing them against the real judge: the picture of `docs/rollouts.md`. Seeded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from marserve.rollout.course import Course, RolloutSpec
from marserve.rollout.judge import Answers
from support.judged_versions import TICK_S, Behaviour, Growing

HOLD_S = 30.0
PER_S = 200.0
LONGEST_S = 200.0
STORIES = (
    ("as good as the one that serves", Behaviour(), 1),
    ("3 % of its requests fail", Behaviour(errors=0.031), 2),
    ("twice as slow", Behaviour(slowness=2.0), 3),
    ("every request fails", Behaviour(errors=1.0), 4),
)


@dataclass(frozen=True)
class Story:
    """What became of one candidate: its shares as (second, percent), when it ended and how."""

    title: str
    shares: list[tuple[float, float]]
    ended_s: float
    state: str
    reason: str
    requests: int


def play(title: str, candidate: Behaviour, seed: int) -> Story:
    """Roll one candidate out, step by step, with a window of counts for each step."""
    draw = numpy.random.default_rng(seed)
    course = Course(RolloutSpec("2.0", hold_s=HOLD_S))
    course.begin(0.0)
    shares = [(0.0, course.share)]
    new, old = Growing(candidate, draw), Growing(Behaviour(), draw)
    now, requests = 0.0, 0
    while not course.has_ended and now < LONGEST_S:
        now += TICK_S
        count = int(draw.poisson(PER_S * TICK_S))
        ours = int(draw.binomial(count, course.share / 100))
        requests += ours
        step = course.step
        course.look(now, old.serve(count - ours), new.serve(ours), Answers())
        if course.step != step:
            new, old = Growing(candidate, draw), Growing(Behaviour(), draw)
        if course.share != shares[-1][1]:
            shares.append((now, course.share))
    return Story(title, shares, now, course.state, course.reason, requests)


def draw_svg() -> str:
    """All stories below each other."""
    left, top, width, height, gap = 40.0, 34.0, 660.0, 70.0, 46.0
    scale = width / 130.0
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {top + len(STORIES) * (height + gap):g}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{left:g}" y="16" font-size="13">Share of the candidate at {PER_S:g} requests a second, steps 5, 25, '
        f"50, 100 %, {HOLD_S:g} s each</text>",
    ]
    for number, (title, candidate, seed) in enumerate(STORIES):
        story = play(title, candidate, seed)
        base = top + number * (height + gap) + height + 8
        points = [f"{left:g},{base:g}"]
        for (begin, share), end in zip(story.shares, [at for at, _ in story.shares[1:]] + [story.ended_s], strict=True):
            level = base - height * share / 100
            points += [f"{left + scale * begin:.1f},{level:.1f}", f"{left + scale * end:.1f},{level:.1f}"]
        at = left + scale * story.ended_s
        colour = "#2a7d46" if story.state == "promoted" else "#b3261e"
        if story.state == "promoted":
            points.append(f"{left + width:.1f},{base - height:.1f}")
        else:
            points += [f"{at:.1f},{base:.1f}", f"{left + width:.1f},{base:.1f}"]
        lines += [
            f'<line x1="{left:g}" y1="{base:g}" x2="{left + width:g}" y2="{base:g}" stroke="#999999"/>',
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<line x1="{at:.1f}" y1="{base - height:.1f}" x2="{at:.1f}" y2="{base:.1f}" stroke="{colour}" '
            'stroke-dasharray="3 3"/>',
            f'<text x="{left:g}" y="{base - height - 6:.1f}">{title}: {story.state} after {story.ended_s:g} s and '
            f"{story.requests} requests</text>",
            f'<text x="{left - 32:g}" y="{base - height + 4:.1f}">100 %</text>',
        ]
        lines += [
            f'<text x="{left + scale * second:.1f}" y="{base + 14:.1f}" fill="#666666">{second:g} s</text>'
            for second in (0, 30, 60, 90, 120)
        ]
    return "\n".join([*lines, "</svg>", ""])
