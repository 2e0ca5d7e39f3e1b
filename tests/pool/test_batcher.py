"""Tests for the batcher: which jobs leave together, and when. Times are seconds that the tests pass."""

from __future__ import annotations

from typing import Literal

from marserve.messages import Part, Request
from marserve.pool.batcher import Batcher
from marserve.pool.queue import Job, JobQueue, JobState
from support.receivers import Told


class Stage:
    """A batcher, and the jobs that were put into its queue."""

    def __init__(self, policy: Literal["idle", "fixed"], *, size: int = 4, delay_s: float = 0.1) -> None:
        self.queue = JobQueue()
        self.batcher = Batcher(self.queue, max_batch_size=size, max_delay_s=delay_s, policy=policy)

    def cancel(self, job: Job) -> None:
        """As the owner of jobs."""
        was_waiting, job.state = job.state is JobState.WAITING, JobState.DONE
        if was_waiting:
            self.queue.leave(job)

    def put(self, at: float = 0.0, *, is_describe: bool = False) -> Job:
        """A job that arrives at `at`."""
        job = Job(Request("r", [Part("body", b"")], is_describe=is_describe), Told(), at, None, self)
        self.queue.enqueue(job)
        return job

    def group(self, count: int) -> list[Job]:
        """A group of jobs that must run by themselves."""
        jobs = [self.put() for _ in range(count)]
        assert self.queue.take(count) == jobs
        for job in jobs:
            job.state = JobState.GROUPED
        self.batcher.groups.append(jobs)
        return jobs


# ------------------------------------------------------------------------------------------- idle


def test_an_idle_worker_takes_what_is_there_at_once() -> None:
    """Nobody waits while a worker is free."""
    stage = Stage("idle")
    job = stage.put(at=10.0)

    batch = stage.batcher.next_batch(10.0, idle=True, ahead=False)

    assert batch == ([job], False)


def test_a_batch_holds_no_more_than_its_size() -> None:
    """The rest waits for the next worker."""
    stage = Stage("idle", size=4)
    jobs = [stage.put() for _ in range(6)]

    batch = stage.batcher.next_batch(0.0, idle=True, ahead=False)

    assert batch == (jobs[:4], False)
    assert len(stage.queue) == 2


def test_nothing_leaves_while_nobody_can_take_it() -> None:
    """No worker is idle, none may be sent a second batch."""
    stage = Stage("idle")
    stage.put()

    assert stage.batcher.next_batch(100.0, idle=False, ahead=False) is None
    assert stage.batcher.next_wake(idle=False, ahead=False) is None


def test_a_full_batch_is_sent_ahead_to_a_busy_worker() -> None:
    """It is there when the worker ends its present one."""
    stage = Stage("idle", size=2)
    jobs = [stage.put(), stage.put()]

    assert stage.batcher.next_batch(0.0, idle=False, ahead=True) == (jobs, False)


def test_a_batch_that_is_not_full_is_sent_ahead_when_its_oldest_has_waited_long_enough() -> None:
    """Until then it may still fill."""
    stage = Stage("idle", size=4, delay_s=0.1)
    job = stage.put(at=5.0)
    stage.put(at=5.09)

    early = stage.batcher.next_batch(5.099, idle=False, ahead=True)
    wake = stage.batcher.next_wake(idle=False, ahead=True)
    due = stage.batcher.next_batch(5.1, idle=False, ahead=True)

    assert early is None
    assert wake == 5.1
    assert due is not None
    assert due[0][0] is job
    assert len(due[0]) == 2


# ------------------------------------------------------------------------------------------- groups


def test_a_group_goes_before_everything_that_waits() -> None:
    """It came first, and its clients have waited longest."""
    stage = Stage("idle")
    group = stage.group(2)
    stage.put()

    assert stage.batcher.next_batch(0.0, idle=True, ahead=False) == (group, True)


def test_a_group_is_never_sent_ahead() -> None:
    """It may hold what raises or kills; a second batch in flight would share its fate."""
    stage = Stage("idle", size=1)
    stage.group(1)

    assert stage.batcher.next_batch(100.0, idle=False, ahead=True) is None


def test_those_of_a_group_who_have_left_do_not_go() -> None:
    """And a group of which everybody left is passed over."""
    stage = Stage("idle")
    gone, partly = stage.group(2), stage.group(2)
    for job in (*gone, partly[0]):
        job.cancel()

    assert stage.batcher.next_batch(0.0, idle=True, ahead=False) == ([partly[1]], True)


def test_forgetting_ended_groups_keeps_those_in_which_somebody_waits() -> None:
    """Otherwise a pool without workers would never be empty again."""
    stage = Stage("idle")
    gone, living = stage.group(1), stage.group(1)
    gone[0].cancel()

    stage.batcher.forget_ended_groups()

    assert list(stage.batcher.groups) == [living]


# ------------------------------------------------------------------------------------------- fixed


def test_fixed_collects_for_the_delay_from_its_first_job() -> None:
    """TorchServe's classic wait, also while a worker is idle."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    jobs = [stage.put(at=1.0)]

    first = stage.batcher.next_batch(1.0, idle=True, ahead=False)
    wake = stage.batcher.next_wake(idle=True, ahead=False)
    jobs.append(stage.put(at=1.05))
    second = stage.batcher.next_batch(1.05, idle=True, ahead=False)
    due = stage.batcher.next_batch(1.1, idle=True, ahead=False)

    assert (first, second) == (None, None)
    assert wake == 1.1
    assert due == (jobs, False)


def test_fixed_leaves_at_once_when_the_batch_is_full() -> None:
    """Waiting longer would gain nothing."""
    stage = Stage("fixed", size=2, delay_s=0.1)
    jobs = [stage.put()]
    stage.batcher.next_batch(0.0, idle=True, ahead=False)

    jobs.append(stage.put())

    assert stage.batcher.next_batch(0.01, idle=True, ahead=False) == (jobs, False)


def test_fixed_with_a_batch_of_one_never_waits() -> None:
    """As in TorchServe."""
    stage = Stage("fixed", size=1, delay_s=10.0)
    job = stage.put()

    assert stage.batcher.next_batch(0.0, idle=True, ahead=False) == ([job], False)


def test_the_collecting_begins_with_the_worker_and_not_with_the_job() -> None:
    """What waited while all were busy still gives its mates the delay."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    job = stage.put(at=0.0)
    assert stage.batcher.next_batch(0.0, idle=False, ahead=False) is None

    begun = stage.batcher.next_batch(7.0, idle=True, ahead=False)

    assert begun is None
    assert stage.batcher.next_batch(7.1, idle=True, ahead=False) == ([job], False)


def test_each_batch_has_a_collecting_time_of_its_own() -> None:
    """The second does not inherit the end of the first."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    stage.put()
    stage.batcher.next_batch(0.0, idle=True, ahead=False)
    assert stage.batcher.next_batch(0.1, idle=True, ahead=False) is not None

    stage.put(at=0.15)

    assert stage.batcher.next_batch(0.15, idle=True, ahead=False) is None
    assert stage.batcher.next_wake(idle=True, ahead=False) == 0.25


def test_an_emptied_queue_ends_the_collecting() -> None:
    """The next job begins a wait of its own."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    stage.put().cancel()
    assert stage.batcher.next_batch(0.0, idle=True, ahead=False) is None

    stage.put(at=0.09)

    assert stage.batcher.next_batch(0.09, idle=True, ahead=False) is None
    assert stage.batcher.next_wake(idle=True, ahead=False) == 0.19


def test_collecting_wakes_nobody_while_no_worker_is_idle() -> None:
    """Whoever collected has been given something else; the next idle worker asks by itself."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    stage.put()
    stage.batcher.next_batch(0.0, idle=True, ahead=False)

    assert stage.batcher.next_wake(idle=False, ahead=False) is None


def test_fixed_sends_nothing_ahead() -> None:
    """A busy worker asks when it is done."""
    stage = Stage("fixed", size=1)
    stage.put()

    assert stage.batcher.next_batch(100.0, idle=False, ahead=True) is None


def test_a_describe_job_does_not_wait_for_company() -> None:
    """It would get none."""
    stage = Stage("fixed", size=4, delay_s=10.0)
    job = stage.put(is_describe=True)
    stage.put()

    assert stage.batcher.next_batch(0.0, idle=True, ahead=False) == ([job], False)
