"""Tests for the queue: order, describe requests alone, and jobs that leave before their turn."""

from __future__ import annotations

import itertools

from marserve.messages import Part, Request
from marserve.pool.queue import Job, JobQueue, JobState
from support.receivers import Told


class Owner:
    """Ends jobs as the dispatcher does, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.queue = JobQueue()
        self.cancels = 0
        self._ids = itertools.count()

    def cancel(self, job: Job) -> None:
        """The client has gone."""
        self.cancels += 1
        job.state = JobState.DONE
        self.queue.leave(job)

    def put(self, *, is_describe: bool = False, is_explain: bool = False) -> Job:
        """A new job at the end of the queue."""
        parts = [Part("body", b"")]
        request = Request(str(next(self._ids)), parts, is_describe=is_describe, is_explain=is_explain)
        job = Job(request, Told(), 0.0, None, self)
        self.queue.enqueue(job)
        return job


def test_jobs_leave_in_the_order_in_which_they_came() -> None:
    """First come, first served."""
    owner = Owner()
    jobs = [owner.put() for _ in range(5)]

    first = owner.queue.take(3)
    rest = owner.queue.take(3)

    assert first == jobs[:3]
    assert rest == jobs[3:]
    assert len(owner.queue) == 0


def test_a_cancelled_job_neither_counts_nor_leaves() -> None:
    """Its place in the line is passed over."""
    owner = Owner()
    jobs = [owner.put() for _ in range(3)]

    jobs[0].cancel()

    assert len(owner.queue) == 2
    assert owner.queue.oldest() is jobs[1]
    assert owner.queue.take(5) == jobs[1:]


def test_cancelling_twice_is_cancelling_once() -> None:
    """Surfaces may say so as often as they like."""
    owner = Owner()
    job = owner.put()

    job.cancel()
    job.cancel()

    assert owner.cancels == 1
    assert len(owner.queue) == 0


def test_jobs_that_are_put_back_stand_at_the_head_in_their_old_order() -> None:
    """A worker that gave jobs back unrun must not cost them their place."""
    owner = Owner()
    jobs = [owner.put() for _ in range(4)]
    taken = owner.queue.take(2)

    owner.queue.put_back(taken)

    assert len(owner.queue) == 4
    assert owner.queue.take(4) == jobs


def test_a_describe_job_comes_alone() -> None:
    """It asks the handler something else, so it has no company, before or behind."""
    owner = Owner()
    before, describe, after = owner.put(), owner.put(is_describe=True), owner.put()

    batches = [owner.queue.take(4) for _ in range(3)]

    assert batches == [[before], [describe], [after]]


def test_explanations_and_predictions_do_not_share_a_batch() -> None:
    """A handler looks at the first row only to tell which it is asked for."""
    owner = Owner()
    kinds = [False, False, True, True, False]
    jobs = [owner.put(is_explain=is_explain) for is_explain in kinds]

    batches = [owner.queue.take(4) for _ in range(3)]

    assert batches == [jobs[:2], jobs[2:4], jobs[4:]]


def test_the_oldest_of_an_empty_queue_is_none() -> None:
    """Also when all that is in the line has been cancelled."""
    owner = Owner()
    job = owner.put()

    job.cancel()

    assert owner.queue.oldest() is None
    assert owner.queue.take(1) == []


def test_clients_that_come_and_go_do_not_lengthen_the_line() -> None:
    """The line is cleared of ended jobs before they become many."""
    owner = Owner()
    keep = owner.put()
    owner.queue.take(1)
    owner.queue.put_back([keep])

    for _ in range(10_000):
        owner.put().cancel()

    assert len(owner.queue) == 1
    assert len(owner.queue._line) < 200


def test_clearing_returns_the_living_oldest_first() -> None:
    """Whoever clears the queue has to end what was in it."""
    owner = Owner()
    jobs = [owner.put() for _ in range(3)]
    jobs[1].cancel()

    cleared = owner.queue.clear()

    assert cleared == [jobs[0], jobs[2]]
    assert len(owner.queue) == 0
    assert owner.queue.take(3) == []
