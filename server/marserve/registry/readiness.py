"""Whether the server should be sent requests, and why not. Pure.

A version is judged by the default version's rule: as soon as one worker has loaded it (none, if it is to have none).
A version that was registered while the server ran counts from the end of its first load on: one model more must not
take the others' traffic away. Models of the start count from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """How the default version of one model stands. `is_settled`: its first load has ended, well or badly."""

    model: str
    version: str
    min_workers: int
    ready_workers: int
    is_at_startup: bool
    is_settled: bool

    @property
    def can_answer(self) -> bool:
        """Whether as many workers are loaded as a first answer needs."""
        return self.ready_workers >= min(1, self.min_workers)


@dataclass(frozen=True, slots=True)
class Readiness:
    """`is_ready`: send requests. `is_started`: the models of the start were all tried. `reasons`: sentences."""

    is_ready: bool
    is_started: bool
    reasons: tuple[str, ...] = ()
    startup_reasons: tuple[str, ...] = ()


def judge(
    standings: Iterable[Standing], *, is_draining: bool, has_tried_startup: bool, startup_failures: Sequence[str]
) -> Readiness:
    """Whether the server is ready, and whether it has started."""
    reasons = ["the server is shutting down"] if is_draining else []
    startup_reasons = [*startup_failures]
    is_started = has_tried_startup
    if not has_tried_startup:
        reasons.append("models of the start are still being read")
        startup_reasons.append("models of the start are still being read")
    for standing in standings:
        if standing.can_answer or not (standing.is_settled or standing.is_at_startup):
            continue
        why = f'no worker of model "{standing.model}" version {standing.version} has loaded it'
        reasons.append(why)
        if standing.is_at_startup and not standing.is_settled:
            is_started = False
            startup_reasons.append(why)
    return Readiness(not reasons, is_started, tuple(reasons), tuple(startup_reasons))
