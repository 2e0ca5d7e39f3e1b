"""Deadlines: which job is ended when, and how many are kept."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.messages import Request
from marserve.pool.dispatch.deadlines import Deadlines
from marserve.pool.dispatch.jobs import Job, JobState
from support.receivers import Told

STEPS = st.lists(st.tuples(st.sampled_from(["watch", "watch", "end", "take", "look"]), st.integers(0, 20)), max_size=60)


def job_of(name: str) -> Job:
    """A job that waits."""
    return Job(Request(name, []), Told(), 0.0, None, None)  # type: ignore[arg-type]


def all_due(deadlines: Deadlines, now: float) -> list[Job]:
    """The jobs whose deadline has come; they are forgotten."""
    return list(iter(lambda: deadlines.take_due(now), None))


@given(STEPS)
def test_it_names_what_a_look_at_every_job_names(steps: list[tuple[str, int]]) -> None:
    """Which jobs are due, soonest first, and the soonest deadline of those that have not ended."""
    deadlines = Deadlines()
    jobs: list[tuple[float, Job]] = []

    for what, number in steps:
        if what == "watch":
            jobs.append((float(number), job_of(str(len(jobs)))))
            deadlines.watch(*jobs[-1])
        elif what == "end" and jobs:
            jobs[number % len(jobs)][1].state = JobState.DONE
        elif what == "take":
            due = sorted(((when, job) for when, job in jobs if when <= number), key=lambda one: one[0])
            jobs = [one for one in jobs if one not in due]
            taken = all_due(deadlines, number)
            assert [job for job in taken if job.state is not JobState.DONE] == [
                job for _, job in due if job.state is not JobState.DONE
            ]
        else:
            living = [when for when, job in jobs if job.state is not JobState.DONE]
            assert deadlines.first <= min(living, default=math.inf) == deadlines.soonest()


def test_many_deadlines_are_walked_through_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time when there are twice as many as lived the last time: no request costs a look at all of them."""
    deadlines, job = Deadlines(), job_of("waits")
    walks: list[int] = []
    heapify = heapq.heapify
    monkeypatch.setattr(heapq, "heapify", lambda heap: (walks.append(len(heap)), heapify(heap)))

    for index in range(2000):
        deadlines.watch(100.0 + index, job)

    assert walks == [256, 512, 1024]


def test_jobs_that_end_early_are_forgotten_once_they_are_the_most() -> None:
    """Clients that come and go fill no memory, though their deadlines are far."""
    deadlines = Deadlines()
    living = [job_of("living") for _ in range(10)]
    for job in living:
        deadlines.watch(1e6, job)

    for _ in range(10_000):
        ended = job_of("ended")
        deadlines.watch(1e6, ended)
        ended.state = JobState.DONE

    assert len(deadlines) <= 256
    assert all_due(deadlines, 2e6)[:10] == living
