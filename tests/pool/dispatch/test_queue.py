"""Tests for the queue: order, describe requests alone, and jobs that leave before their turn."""

from __future__ import annotations

import itertools

import pytest

from marserve.messages import Part, Request
from marserve.pool.dispatch.jobs import Job, JobState
from marserve.pool.dispatch.queue import JobQueue
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


# ------------------------------------------------------------------------------------------- priorities


def line_up(owner: Owner, *jobs: tuple[float, int]) -> list[Job]:
    """Put jobs of these arrivals and priorities, in order."""
    made = []
    for arrived, priority in jobs:
        job = Job(Request(f"{arrived:g}/{priority}", [Part("body", b"")]), Told(), arrived, None, owner, priority)
        owner.queue.enqueue(job)
        made.append(job)
    return made


def names(jobs: list[Job]) -> list[str]:
    """`arrival/priority` of each."""
    return [job.request.id for job in jobs]


def test_the_more_urgent_go_first_and_within_a_priority_the_first_to_come() -> None:
    """0 is the most urgent."""
    owner = Owner()
    line_up(owner, (0.0, 5), (0.1, 9), (0.2, 0), (0.3, 5), (0.4, 0))

    taken = owner.queue.take(10)

    assert names(taken) == ["0.2/0", "0.4/0", "0/5", "0.3/5", "0.1/9"]
    assert len(owner.queue) == 0


def test_who_has_waited_a_second_for_each_step_is_not_overtaken_any_more() -> None:
    """Ageing: nobody is overtaken for ever, and an urgent job that comes later waits for those who grew old."""
    owner = Owner()
    line_up(owner, (0.0, 9), (0.0, 5), (4.9, 0), (5.1, 0), (8.9, 0), (9.1, 0))

    order = names(owner.queue.take(10))

    assert order == ["4.9/0", "0/5", "5.1/0", "8.9/0", "0/9", "9.1/0"]


def test_a_batch_may_mix_priorities_and_the_next_goes_on_where_it_ended() -> None:
    """Priorities order requests; they do not part them."""
    owner = Owner()
    line_up(owner, *[(index / 10, index % 3) for index in range(9)])

    taken = [names(owner.queue.take(4)) for _ in range(3)]

    assert taken == [["0/0", "0.3/0", "0.6/0", "0.1/1"], ["0.4/1", "0.7/1", "0.2/2", "0.5/2"], ["0.8/2"]]


def test_cancelled_jobs_of_any_line_are_neither_counted_nor_taken() -> None:
    """And a line that they leave empty is gone."""
    owner = Owner()
    jobs = line_up(owner, (0.0, 5), (0.1, 1), (0.2, 1), (0.3, 9))

    for job in (jobs[1], jobs[3]):
        job.cancel()

    assert len(owner.queue) == 2
    assert names(owner.queue.take(10)) == ["0.2/1", "0/5"]
    assert owner.queue.oldest() is None


def test_a_line_does_not_grow_with_clients_that_come_and_go() -> None:
    """Ten thousand of them at a priority that nobody else has, behind one who stays."""
    owner = Owner()
    line_up(owner, (0.0, 1))

    for index in range(10_000):
        (job,) = line_up(owner, (float(index), 1))
        job.cancel()

    assert len(owner.queue) == 1
    assert sum(len(line) for line in owner.queue._lines()) < 100


def test_the_oldest_is_who_came_first_whatever_its_priority() -> None:
    """The batch delay is counted from the oldest; the first is whose turn it is."""
    owner = Owner()
    line_up(owner, (0.0, 9), (0.1, 0))

    oldest, first = owner.queue.oldest(), owner.queue.first()

    assert oldest is not None
    assert first is not None
    assert names([oldest, first]) == ["0/9", "0.1/0"]


def test_jobs_that_come_back_are_at_the_head_of_their_lines() -> None:
    """A worker died before it had begun them."""
    owner = Owner()
    line_up(owner, (0.0, 5), (0.1, 0), (0.2, 5), (0.3, 0))

    owner.queue.put_back(owner.queue.take(3))

    assert len(owner.queue) == 4
    assert names(owner.queue.take(4)) == ["0.1/0", "0.3/0", "0/5", "0.2/5"]


def test_how_many_go_before_a_newcomer_depends_on_its_priority() -> None:
    """Its equals go first, the less urgent do not."""
    owner = Owner()
    line_up(owner, (0.0, 5), (0.1, 5), (0.2, 9), (0.3, 1))

    before = [owner.queue.before(priority) for priority in (0, 1, 5, 9)]

    assert before == [0, 1, 3, 4]


def test_the_newest_of_the_least_urgent_makes_room_but_never_the_first_of_its_line() -> None:
    """Who has waited longest at its priority stays; the equally urgent and the more urgent do too."""
    owner = Owner()
    jobs = line_up(owner, (0.0, 9), (0.1, 5), (0.2, 5), (0.3, 5), (0.4, 1))

    assert owner.queue.displaceable(5) is None
    assert owner.queue.displaceable(9) is None
    assert owner.queue.displaceable(1) is jobs[3]
    jobs[3].cancel()
    assert owner.queue.displaceable(0) is jobs[2]
    jobs[2].cancel()
    assert owner.queue.displaceable(0) is None


def test_with_one_priority_nobody_makes_room() -> None:
    """The common case: a full queue refuses."""
    owner = Owner()
    for _ in range(5):
        owner.put()

    assert owner.queue.displaceable(5) is None
    assert owner.queue.displaceable(0) is not None


def test_clearing_takes_all_lines() -> None:
    """Nobody is forgotten when a version goes."""
    owner = Owner()
    jobs = line_up(owner, (0.0, 5), (0.1, 0), (0.2, 9))
    jobs[0].cancel()

    cleared = owner.queue.clear()

    assert sorted(names(cleared)) == ["0.1/0", "0.2/9"]
    assert len(owner.queue) == 0
    assert owner.queue.take(3) == []


def test_lost_machines_count_against_a_request_only_after_many() -> None:
    """A worker's death does at once."""
    job = Owner().put()

    for _ in range(4):
        job.lost_worker(is_suspect=False)
    assert (job.deaths, job.losses) == (0, 4)
    job.lost_worker(is_suspect=False)
    assert job.deaths == 1
    job.lost_worker(is_suspect=True)
    assert job.deaths == 2


def test_describes_and_explanations_stand_alone_among_priorities_too() -> None:
    """As in a queue of one priority; who is behind them comes with the next batch."""
    owner = Owner()
    kinds = [
        *((0, False, False), (0, True, False), (0, False, False), (0, False, True)),
        *((1, False, True), (1, False, False)),
    ]
    jobs = []
    for priority, is_describe, is_explain in kinds:
        request = Request("r", [Part("body", b"")], is_describe=is_describe, is_explain=is_explain)
        jobs.append(Job(request, Told(), 0.0, None, owner, priority))
        owner.queue.enqueue(jobs[-1])

    batches = [owner.queue.take(4) for _ in range(6)]

    assert batches == [jobs[:1], jobs[1:2], jobs[2:3], jobs[3:5], jobs[5:], []]


def test_what_has_been_taken_is_counted_before_nobody_any_more() -> None:
    """A line that is empty is gone, and with it what the queue does for several."""
    owner = Owner()
    line_up(owner, (0.0, 5), (0.1, 0), (0.2, 0), (0.3, 0))
    assert names(owner.queue.take(2)) == ["0.1/0", "0.2/0"]

    assert [owner.queue.before(priority) for priority in (0, 5)] == [1, 2]
    assert names(owner.queue.take(1)) == ["0.3/0"]
    assert [owner.queue.before(priority) for priority in (0, 5)] == [0, 1]
    assert owner.queue._others == {}


@pytest.mark.parametrize("priority", [5, 0])
def test_a_line_is_walked_only_when_most_of_it_has_ended(priority: int) -> None:
    """A thousand clients that leave one after another cost no walk while as many stay, and then a few."""
    owner = Owner()
    jobs = line_up(owner, *[(float(index), priority) for index in range(2000)])

    def walks(leaving: list[Job]) -> int:
        count = 0
        for job in leaving:
            before = owner.queue._lines()[-1]
            job.cancel()
            count += owner.queue._lines()[-1] is not before
        return count

    assert walks(jobs[1000:]) == 0
    assert 1 <= walks(jobs[1:1000]) <= 6
    assert owner.queue.take(10) == jobs[:1]


def test_a_job_that_was_not_counted_yet_has_no_length_and_no_history() -> None:
    """Zero is "not known": lengths are looked up for it, and no death is held against it."""
    job = Owner().put()

    assert (job.length, job.length_digest, job.deaths, job.losses) == (0, b"", 0, 0)
    assert (job.state, job.flight, job.held_by, job.has_sent_pieces) == (JobState.WAITING, None, None, False)


class Holder(Owner):
    """Notes who holds and who lets go."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def hold(self, job: Job) -> None:
        """A client does not keep up."""
        self.heard.append("hold")
        job.held_by = "w"

    def resume(self, job: Job) -> None:
        """It has caught up."""
        self.heard.append("resume")
        job.held_by = None


def test_a_client_holds_only_what_runs_and_lets_go_only_what_it_holds() -> None:
    """Both may be said at any time, and any number of times."""
    owner = Holder()
    job = owner.put()
    for state in (JobState.WAITING, JobState.GROUPED, JobState.DONE):
        job.state = state
        job.hold()
        job.resume()
    assert owner.heard == []

    job.state = JobState.RUNNING
    for call in (job.hold, job.hold, job.resume, job.resume, job.hold):
        call()

    assert owner.heard == ["hold", "resume", "hold"]


def test_nobody_makes_room_for_its_equal_or_for_one_that_is_less_urgent() -> None:
    """In whichever line the newest would be; the model's own priority is one among them."""
    owner = Owner()
    jobs = line_up(owner, (0.0, 7), (0.1, 7), (0.2, 5), (0.3, 5))

    assert [owner.queue.displaceable(priority) for priority in (9, 8, 7)] == [None] * 3
    assert owner.queue.displaceable(6) is jobs[1]
    assert owner.queue.displaceable(5) is jobs[1]
    jobs[1].cancel()
    assert owner.queue.displaceable(5) is None
    assert owner.queue.displaceable(4) is jobs[3]


def test_jobs_that_come_back_are_counted() -> None:
    """In their own lines, and in the whole."""
    owner = Owner()
    line_up(owner, (0.0, 5), (0.1, 0))
    taken = owner.queue.take(2)
    assert len(owner.queue) == 0

    owner.queue.put_back(iter(taken))

    assert len(owner.queue) == 2
    assert [owner.queue.before(priority) for priority in (0, 4, 5)] == [1, 1, 2]
