"""Tests for the batcher: which jobs leave together, and when. Times are seconds that the tests pass."""

from __future__ import annotations

from typing import Literal, cast

import pytest

from marserve.messages import Part, Request
from marserve.pool.dispatch.batcher import Batcher
from marserve.pool.dispatch.jobs import Job, JobState
from marserve.pool.dispatch.lengths.asked_lengths import AskedLengths
from marserve.pool.dispatch.lengths.latency_goal import GoalPolicy
from marserve.pool.dispatch.queue import JobQueue
from support.receivers import Told


class Stage:
    """A batcher, and the jobs that were put into its queue."""

    def __init__(self, policy: Literal["idle", "fixed"], *, size: int = 4, delay_s: float = 0.1) -> None:
        self.queue = JobQueue()
        self.batcher = Batcher(self.queue, max_batch_size=size, max_delay_s=delay_s, policy=policy)

    def ahead(self, now: float) -> tuple[list[Job], bool] | None:
        """What a busy worker is sent, as its mode asks for it."""
        return self.batcher.next_batch(now, ahead=True) if self.batcher.pays_ahead(now) else None

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

    batch = stage.batcher.next_batch(10.0)

    assert batch == ([job], False)


def test_a_batch_holds_no_more_than_its_size() -> None:
    """The rest waits for the next worker."""
    stage = Stage("idle", size=4)
    jobs = [stage.put() for _ in range(6)]

    batch = stage.batcher.next_batch(0.0)

    assert batch == (jobs[:4], False)
    assert len(stage.queue) == 2


def test_no_moment_changes_anything_while_no_worker_can_take_a_batch() -> None:
    """No worker is idle, none may be sent a second batch."""
    stage = Stage("idle")
    stage.put()

    assert stage.batcher.next_wake(idle=False, ahead=False) is None


def test_a_full_batch_is_sent_ahead_to_a_busy_worker() -> None:
    """It is there when the worker ends its present one."""
    stage = Stage("idle", size=2)
    jobs = [stage.put(), stage.put()]

    assert stage.ahead(0.0) == (jobs, False)


def test_a_batch_that_is_not_full_is_sent_ahead_when_its_oldest_has_waited_long_enough() -> None:
    """Until then it may still fill."""
    stage = Stage("idle", size=4, delay_s=0.1)
    job = stage.put(at=5.0)
    stage.put(at=5.09)

    early = stage.ahead(5.099)
    wake = stage.batcher.next_wake(idle=False, ahead=True)
    due = stage.ahead(5.1)

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

    assert stage.batcher.next_batch(0.0) == (group, True)


def test_a_group_is_never_sent_ahead() -> None:
    """It may hold what raises or kills; a second batch in flight would share its fate."""
    stage = Stage("idle", size=1)
    stage.group(1)

    assert stage.ahead(100.0) is None


def test_those_of_a_group_who_have_left_do_not_go() -> None:
    """And a group of which everybody left is passed over."""
    stage = Stage("idle")
    gone, partly = stage.group(2), stage.group(2)
    for job in (*gone, partly[0]):
        job.cancel()

    assert stage.batcher.next_batch(0.0) == ([partly[1]], True)


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

    first = stage.batcher.next_batch(1.0)
    wake = stage.batcher.next_wake(idle=True, ahead=False)
    jobs.append(stage.put(at=1.05))
    second = stage.batcher.next_batch(1.05)
    due = stage.batcher.next_batch(1.1)

    assert (first, second) == (None, None)
    assert wake == 1.1
    assert due == (jobs, False)


def test_fixed_leaves_at_once_when_the_batch_is_full() -> None:
    """Waiting longer would gain nothing."""
    stage = Stage("fixed", size=2, delay_s=0.1)
    jobs = [stage.put()]
    stage.batcher.next_batch(0.0)

    jobs.append(stage.put())

    assert stage.batcher.next_batch(0.01) == (jobs, False)


def test_fixed_with_a_batch_of_one_never_waits() -> None:
    """As in TorchServe."""
    stage = Stage("fixed", size=1, delay_s=10.0)
    job = stage.put()

    assert stage.batcher.next_batch(0.0) == ([job], False)


def test_the_collecting_begins_with_the_worker_and_not_with_the_job() -> None:
    """What waited while all were busy still gives its mates the delay."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    job = stage.put(at=0.0)

    begun = stage.batcher.next_batch(7.0)

    assert begun is None
    assert stage.batcher.next_batch(7.1) == ([job], False)


def test_each_batch_has_a_collecting_time_of_its_own() -> None:
    """The second does not inherit the end of the first."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    stage.put()
    stage.batcher.next_batch(0.0)
    assert stage.batcher.next_batch(0.1) is not None

    stage.put(at=0.15)

    assert stage.batcher.next_batch(0.15) is None
    assert stage.batcher.next_wake(idle=True, ahead=False) == 0.25


def test_an_emptied_queue_ends_the_collecting() -> None:
    """The next job begins a wait of its own."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    stage.put().cancel()
    assert stage.batcher.next_batch(0.0) is None

    stage.put(at=0.09)

    assert stage.batcher.next_batch(0.09) is None
    assert stage.batcher.next_wake(idle=True, ahead=False) == 0.19


def test_collecting_wakes_nobody_while_no_worker_is_idle() -> None:
    """Whoever collected has been given something else; the next idle worker asks by itself."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    stage.put()
    stage.batcher.next_batch(0.0)

    assert stage.batcher.next_wake(idle=False, ahead=False) is None


def test_a_describe_job_does_not_wait_for_company() -> None:
    """It would get none."""
    stage = Stage("fixed", size=4, delay_s=10.0)
    job = stage.put(is_describe=True)
    stage.put()

    assert stage.batcher.next_batch(0.0) == ([job], False)


# ------------------------------------------------------------------------------------------- goal


class Goal:
    """A goal that says what the test wants, and notes what it was asked."""

    def __init__(self, size: int = 1, *, mates: int = 100, is_ahead_allowed: bool = True) -> None:
        self.size, self.mates, self.is_ahead_allowed = size, mates, is_ahead_allowed
        self.asked: list[tuple[object, ...]] = []

    def choose(self, waiting: int, waited_s: float, *, workers: int, length: int) -> int:
        """How many leave."""
        self.asked.append(("choose", waiting, waited_s, workers, length))
        return self.size

    def may_join(self, total: int, count: int, longest: int, length: int) -> bool:
        """Whether one more may join: those that are at most `mates` away from the longest."""
        self.asked.append(("join", total, count, longest, length))
        return abs(longest - length) <= self.mates

    def allows_ahead(self, waiting: int, waited_s: float, *, length: int) -> bool:
        """Whether a busy worker may be sent one."""
        self.asked.append(("ahead", waiting, waited_s, length))
        return self.is_ahead_allowed


class GoalStage(Stage):
    """A batcher with a goal; a body's length is the length of its input unless `lengths` is off."""

    def __init__(
        self, goal: Goal, *, size: int = 4, lengths: bool = True, asked: Asked | None = None, workers: int = 1
    ) -> None:
        self.queue = JobQueue()
        self.batcher = Batcher(
            self.queue,
            max_batch_size=size,
            max_delay_s=0.1,
            policy="goal",
            goal=cast("GoalPolicy", goal),
            length_of=(lambda request: len(request.parts[0].body)) if lengths else None,
            asked_lengths=cast("AskedLengths | None", asked),
            workers=range(workers),
        )

    def put_long(self, length: int, at: float = 0.0) -> Job:
        """A job whose input is so long."""
        job = Job(Request("r", [Part("body", bytes(length))]), Told(), at, None, self)
        self.queue.enqueue(job)
        return job


def test_a_goal_is_asked_with_what_waits_and_its_number_leaves_at_once() -> None:
    """How many, how long the oldest has waited, how many workers share them, how long the first one's input is."""
    goal = Goal(2)
    stage = GoalStage(goal, lengths=False, workers=3)
    jobs = [stage.put(at=1.0), stage.put(at=2.0), stage.put(at=3.0)]

    batch = stage.batcher.next_batch(4.0)

    assert batch == (jobs[:2], False)
    assert goal.asked == [("choose", 3, 3.0, 3, 1)]
    assert stage.batcher.knows_lengths is False


def test_a_job_from_the_future_has_waited_no_time_for_a_goal() -> None:
    """Clocks are read at different moments."""
    goal = Goal(1)
    stage = GoalStage(goal, size=1)
    stage.put(at=5.0)

    assert stage.batcher.pays_ahead(4.0)
    stage.batcher.next_batch(4.0)

    assert [question[2] for question in goal.asked] == [0.0, 0.0]


def test_a_batch_for_a_goal_is_of_about_one_length_and_the_others_keep_their_order() -> None:
    """The one whose turn it is goes, with those that fit; whoever does not fit is still first in line."""
    goal = Goal(3, mates=2)
    stage = GoalStage(goal)
    jobs = [stage.put_long(length) for length in (10, 50, 11, 51, 9, 12)]

    batch = stage.batcher.next_batch(0.0)

    assert batch == ([jobs[0], jobs[2], jobs[4]], False)
    assert goal.asked[0] == ("choose", 6, 0.0, 1, 10)
    assert goal.asked[1:] == [
        ("join", 10, 1, 10, 50),
        ("join", 10, 1, 10, 11),
        ("join", 21, 2, 11, 51),
        ("join", 21, 2, 11, 9),
    ]
    assert stage.queue.take(10) == [jobs[1], jobs[3], jobs[5]]
    assert stage.batcher.guessed == []


def test_only_so_many_are_looked_at_for_a_fitting_length() -> None:
    """Four times the batch's size: a queue of thousands is not walked for each batch."""
    stage = GoalStage(Goal(2, mates=0))
    jobs = [stage.put_long(length) for length in (5, *[50] * 6, 5, 5)]

    first = stage.batcher.next_batch(0.0)

    assert first == ([jobs[0], jobs[7]], False)
    stage = GoalStage(Goal(2, mates=0))
    jobs = [stage.put_long(length) for length in (5, *[50] * 7, 5)]
    assert stage.batcher.next_batch(0.0) == ([jobs[0]], False)
    assert len(stage.queue) == 8


def test_one_alone_needs_no_mates_of_its_length() -> None:
    """Nothing is looked through, and the queue stays as it is."""
    goal = Goal(1)
    stage = GoalStage(goal)
    jobs = [stage.put_long(7), stage.put_long(7)]

    assert stage.batcher.next_batch(0.0) == (jobs[:1], False)
    assert [question[0] for question in goal.asked] == ["choose"]


def test_an_input_of_no_length_counts_as_one() -> None:
    """Shares and means of lengths are never divided by nothing."""
    goal = Goal(2)
    stage = GoalStage(goal)
    job = stage.put_long(0)
    stage.put_long(0)

    stage.batcher.next_batch(0.0)

    assert job.length == 1
    assert goal.asked == [("choose", 2, 0.0, 1, 1), ("join", 1, 1, 1, 1)]


def test_a_goal_sends_ahead_only_full_batches_and_only_what_it_allows() -> None:
    """Full is the batch's size, or sixteen where that is more."""
    goal = Goal(2)
    stage = GoalStage(goal, size=2)
    stage.put_long(7, at=1.0)
    assert stage.batcher.enough_ahead == 2
    assert not stage.batcher.pays_ahead(100.0)
    assert stage.ahead(100.0) is None
    stage.put_long(9, at=2.0)

    assert goal.asked == []
    goal.is_ahead_allowed = False
    assert stage.ahead(4.0) is None
    assert goal.asked == [("ahead", 2, 3.0, 7)]
    goal.is_ahead_allowed = True
    assert stage.ahead(4.0) is not None
    assert GoalStage(goal, size=17).batcher.enough_ahead == 16
    assert Stage("idle", size=17).batcher.enough_ahead == 17


class Asked:
    """Lengths that a handler is asked for: these jobs' are known, the others are guessed."""

    is_offered = True

    def __init__(self, *, is_sure: bool = False) -> None:
        self.is_sure = is_sure

    def look_up(self, job: Job) -> int:
        """The length, or a guess that may be asked for."""
        value = job.request.parts[0].body
        job.length_digest = b"" if len(value) < 40 else b"digest"
        return len(value)


def asked_stage(asked: Asked, size: int) -> GoalStage:
    """A batcher whose lengths are the handler's word."""
    return GoalStage(Goal(size, mates=3), lengths=False, asked=asked)


def test_those_that_were_left_behind_by_a_guess_are_asked_for_first() -> None:
    """With their lengths they might have fitted."""
    stage = asked_stage(Asked(is_sure=True), 2)
    jobs = [stage.put_long(length) for length in (10, 50, 11, 60, 20)]

    assert stage.batcher.knows_lengths
    assert stage.batcher.next_batch(0.0) == ([jobs[0], jobs[2]], False)
    assert stage.batcher.guessed == [jobs[1], jobs[3]]


@pytest.mark.parametrize(
    ("is_sure", "lengths", "guessed"),
    [
        (False, (50, 51), [0, 1]),
        (True, (50, 51), []),
        (False, (50,), []),
        (False, (10, 50, 11), [1]),
    ],
)
def test_what_leaves_is_asked_for_only_where_it_could_teach_something(
    is_sure: bool, lengths: tuple[int, ...], guessed: list[int]
) -> None:
    """While the handler's worth is not known, two or more leave, and nobody was left behind."""
    stage = asked_stage(Asked(is_sure=is_sure), 4)
    jobs = [stage.put_long(length) for length in lengths]

    stage.batcher.next_batch(0.0)

    assert stage.batcher.guessed == [jobs[index] for index in guessed]


def test_lengths_that_no_handler_offers_are_not_asked_for() -> None:
    """Every input counts as one then."""
    asked = Asked()
    asked.is_offered = False
    stage = asked_stage(asked, 2)
    stage.put_long(50)

    assert not stage.batcher.knows_lengths
    stage.batcher.next_batch(0.0)
    assert cast("Goal", stage.batcher.goal).asked == [("choose", 1, 0.0, 1, 1)]


def test_resting_ends_the_collecting_also_where_nothing_ever_waited() -> None:
    """A new job collects for its whole delay."""
    stage = Stage("fixed", size=4, delay_s=0.1)
    stage.put()
    stage.batcher.next_batch(0.0)

    stage.batcher.rest()

    assert stage.batcher.next_wake(idle=True, ahead=False) is None
    assert stage.batcher.next_batch(0.09) is None
    assert stage.batcher.next_wake(idle=True, ahead=False) == 0.09 + 0.1


def test_a_wake_is_asked_for_only_where_a_busy_worker_could_be_sent_one() -> None:
    """With nothing waiting, or an idle worker, no moment would change anything."""
    stage = Stage("idle", size=4, delay_s=0.1)

    assert stage.batcher.next_wake(idle=False, ahead=True) is None
    stage.put(at=1.0)
    assert stage.batcher.next_wake(idle=True, ahead=True) is None
    assert stage.batcher.next_wake(idle=False, ahead=True) == 1.1


def test_forgetting_keeps_a_group_of_which_one_still_waits() -> None:
    """The others have gone."""
    stage = Stage("idle")
    group = stage.group(2)
    group[0].cancel()

    stage.batcher.forget_ended_groups()

    assert list(stage.batcher.groups) == [group]
    assert stage.batcher.has_work
