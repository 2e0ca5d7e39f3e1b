"""Which worker is sent a batch ahead: beside a plain look at all of them, whatever happens to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.pool.dispatch.batcher import MANY_AHEAD_BELOW_S, MAX_IN_FLIGHT, MAX_JOBS_IN_FLIGHT
from marserve.pool.dispatch.jobs import Flight, WorkerLane
from marserve.pool.dispatch.send_ahead import BOUNDS, RoomAhead


class Plain:
    """The same answers by a look at every worker; it remembers since when each has had what it has in flight."""

    def __init__(self) -> None:
        self.since: dict[WorkerLane, int] = {}
        self._seen: dict[WorkerLane, object] = {}

    def note(self, lane: WorkerLane, turn: int) -> None:
        """Something of `lane` has changed, as the `turn`-th thing."""
        seen = None
        if has_room(lane, BOUNDS[-1]):
            slow = 0 if lane.overlaps else sum(bound <= lane.mean_run_s for bound in BOUNDS)
            seen = len(lane.flights), slow
        if seen != self._seen.get(lane):
            self.since[lane], self._seen[lane] = turn, seen

    def forget(self, lane: WorkerLane) -> None:
        """`lane` is gone."""
        self.since.pop(lane, None)
        self._seen.pop(lane, None)

    def least_busy(self, below_s: float) -> WorkerLane | None:
        """Of those with room, who has the fewest batches, and of those for longest."""
        room = [lane for lane in self.since if has_room(lane, below_s)]
        return min(room, key=lambda lane: (len(lane.flights), self.since[lane]), default=None)


def has_room(lane: WorkerLane, below_s: float) -> bool:
    """Whether a lane may be sent a batch ahead: open, busy with no suspect, known to be quick, and with room."""
    flights = lane.flights
    if not flights or not lane.is_open or flights[0].is_group:
        return False
    if lane.overlaps:
        return len(flights) < MAX_IN_FLIGHT
    if not 0 < lane.mean_run_s < below_s:
        return False
    return len(flights) < MAX_IN_FLIGHT or (
        lane.mean_run_s < MANY_AHEAD_BELOW_S and len(flights) * len(flights[-1].jobs) < MAX_JOBS_IN_FLIGHT
    )


def flight(lane: WorkerLane, jobs: int = 1, *, is_group: bool = False) -> None:
    """A batch leaves for a worker."""
    lane.last_number += 1
    lane.flights.append(Flight(lane.last_number, [None] * jobs, is_group, 0.0))  # type: ignore[list-item]


def lane(key: str, *, mean_run_s: float = 0.01, flights: int = 1) -> WorkerLane:
    """A worker that has so much in flight."""
    made = WorkerLane(key, mean_run_s=mean_run_s)
    for _ in range(flights):
        flight(made)
    return made


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send a group", "end", "end", "close", "die", "open", "open overlapping"]),
        st.integers(0, 5),
        st.sampled_from([0.0, 1e-5, 2e-4, 5e-4, 1e-3, 3e-3, 5e-3, 0.02, 0.05, 1.0]),
        st.integers(1, 16),
    ),
    max_size=60,
)


@given(STEPS)
def test_it_says_what_a_look_at_every_worker_says(steps: list[tuple[str, int, float, int]]) -> None:
    """Batches leave and end, workers come, close and die, in any order; asked after each step, for each bound."""
    room, plain = RoomAhead(), Plain()
    lanes: list[WorkerLane] = []
    for turn, (what, number, run_s, jobs) in enumerate(steps):
        if what.startswith("open") or not lanes:
            lanes.append(WorkerLane(str(turn), overlaps=what.endswith("overlapping")))
            continue
        one = lanes[number % len(lanes)]
        if what == "die":
            lanes.remove(one)
            room.forget(one)
            plain.forget(one)
            continue
        if what.startswith("send"):
            flight(one, jobs, is_group=what.endswith("group"))
        elif what == "close":
            one.is_open = False
        elif one.flights:
            one.flights.popleft()
            one.mean_run_s = run_s
        room.note(one)
        plain.note(one, turn)
        for below_s in BOUNDS:
            assert room.least_busy(below_s) is plain.least_busy(below_s)
            assert room.has_any(below_s) == (plain.least_busy(below_s) is not None)
    assert len(room) == sum(has_room(one, BOUNDS[-1]) for one in lanes)


def test_the_one_that_has_run_its_batch_for_longest_is_first_among_equals() -> None:
    """Workers with one batch each, in the order in which they got it; with two it has no room."""
    room = RoomAhead()
    lanes = [lane(key) for key in "abc"]
    for one in lanes:
        room.note(one)
    said = []
    while (least := room.least_busy(0.05)) is not None:
        said.append(least.key)
        flight(least)
        room.note(least)

    assert said == ["a", "b", "c"]
    assert len(room) == 0


@pytest.mark.parametrize("run_s", [0.0, 1e-5, 0.01, 30.0])
def test_a_worker_that_overlaps_has_room_for_one_batch_however_long_its_batches_take(run_s: float) -> None:
    """It begins with it at once; a third one would only wait."""
    room = RoomAhead()
    one = WorkerLane("a", mean_run_s=run_s, overlaps=True)
    flight(one)
    room.note(one)
    assert room.least_busy(BOUNDS[0]) is one

    flight(one)
    room.note(one)

    assert room.least_busy(BOUNDS[-1]) is None


@pytest.mark.parametrize(
    "change",
    [lambda one: setattr(one, "is_open", False), lambda one: setattr(one, "mean_run_s", 0.05),
     lambda one: one.flights.clear(), lambda one: one.flights.appendleft(Flight(9, [], True, 0.0))],
    ids=["closed", "slow", "idle", "with a suspect"],
)  # fmt: skip
def test_who_may_not_be_sent_anything_ahead_loses_its_place(change: Callable[[WorkerLane], object]) -> None:
    """Closed, too slow, without work, or busy with what may have killed another."""
    room = RoomAhead()
    one = lane("a")
    room.note(one)
    assert room.least_busy(0.05) is one

    change(one)
    room.note(one)

    assert room.least_busy(0.05) is None
    assert not room.has_any(0.05)


def test_nothing_of_a_worker_that_is_gone_is_kept() -> None:
    """Thousands come and go; one that never had a place may be forgotten, too."""
    room = RoomAhead()
    for number in range(3000):
        one = lane(str(number))
        if number % 3:
            room.note(one)
        room.forget(one)

    assert len(room) == 0
