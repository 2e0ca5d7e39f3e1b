"""Whether the server should get requests, and why not. Pure.

A model is judged by its default version, and that version by its readiness rule. `any` needs one loaded worker, `min`
needs `min_workers`, `all` as many as there should be now; a version that is to have no workers needs none.
A version that is ready with fewer than `min_workers` serves, and a remark says so.
A version that was registered while the server ran counts from the end of its first load on: one further model must not
take the others' traffic away. Models of the start count from the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # this file knows no pools, only what they say of their workers
    from marserve.pool.pool import WorkerView

Rule = Literal["any", "min", "all"]


@dataclass(frozen=True, slots=True)
class Standing:
    """The workers of one model's default version. `is_settled`: its first load has ended, well or badly."""

    model: str
    version: str
    min_workers: int
    ready_workers: int
    is_at_startup: bool
    is_settled: bool
    rule: Rule = "any"
    wanted_workers: int = 0

    @property
    def needed_workers(self) -> int:
        """The number of loaded workers that the rule asks for."""
        if self.rule == "any":
            return min(1, self.min_workers)
        return max(self.min_workers, self.wanted_workers) if self.rule == "all" else self.min_workers

    @property
    def is_well(self) -> bool:
        """Whether as many workers are loaded as the rule asks for."""
        return self.ready_workers >= self.needed_workers


@dataclass(frozen=True, slots=True)
class Readiness:
    """`is_ready`: the server should get requests. `is_started`: all models of the start were tried.

    `reasons` are sentences that say why not. `remarks` are sentences about faults that need not keep requests away.
    """

    is_ready: bool
    is_started: bool
    reasons: tuple[str, ...] = ()
    startup_reasons: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


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
    remarks = [*startup_failures]
    for standing in standings:
        if standing.is_well:
            if 0 < standing.ready_workers < standing.min_workers:
                remarks.append(_fewer(standing, "serves with"))
            continue
        if not (standing.is_settled or standing.is_at_startup):
            continue
        why = f'no worker of model "{standing.model}" version {standing.version} has loaded it'
        if standing.ready_workers:
            why = f"{_fewer(standing, 'has')}, and its readinessRule is {standing.rule}"
        reasons.append(why)
        if standing.is_at_startup and not standing.is_settled:
            is_started = False
            startup_reasons.append(why)
    return Readiness(not reasons, is_started, tuple(reasons), tuple(startup_reasons), tuple(remarks))


@dataclass(frozen=True, slots=True)
class ModelReadiness:
    """Whether one version can answer, as `DataPlane.is_model_ready` says, and why not: empty if it can.

    `ready_workers` have loaded it, of `needed_workers` at least. The reason is for clients: it names causes, which are
    few fixed words, and nothing that an author's code or a file system has said.
    """

    is_ready: bool
    reason: str
    ready_workers: int
    needed_workers: int


def why_not_ready(workers: Sequence[WorkerView], needed: int, now: float) -> str:
    """Why a version cannot answer that needs so many loaded workers; `now` is UTC in seconds."""
    if not workers:
        return "it is scaled to 0 workers"
    ready = sum(worker.status == "READY" for worker in workers)
    loaded = f"{ready} of {needed} workers have loaded it" if ready else "no worker has loaded it"
    others = [worker for worker in workers if worker.status != "READY"]
    deaths = [worker.last_death for worker in others if worker.last_death is not None]
    if not deaths:
        waiting = any(worker.waits_for for worker in others)
        return f"{loaded}: its workers wait for a device or a machine" if waiting else f"{loaded} yet"
    cause = max(deaths, key=lambda death: death.at).cause
    starts = [worker.next_start_at for worker in others if worker.next_start_at is not None]
    when = "the next one is being started"
    if len(starts) == len(others):
        left_s = min(starts) - now
        when = "another one is started when it is scaled"
        if left_s < math.inf:
            when = f"the next one is started in {max(0, math.ceil(left_s))} s"
    return f"{loaded}: the last one ended ({cause}), and {when}"


def _fewer(standing: Standing, verb: str) -> str:
    wanted = max(standing.needed_workers, standing.min_workers)
    return f'model "{standing.model}" version {standing.version} {verb} {standing.ready_workers} of {wanted} workers'
