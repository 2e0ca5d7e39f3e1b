"""One batch after the other: workers run what they are sent in that order. Pure.

An idle worker is sent a batch as the batcher says; a busy one may be sent the next one ahead
(`pool/dispatch/send_ahead.py`). Where the handler says how long inputs are, it is asked right before a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from marserve.messages import Request, Result
from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.batcher import Batcher
from marserve.pool.dispatch.fingerprints import MAX_DEATHS
from marserve.pool.dispatch.jobs import Flight, Job, JobState, Loss, Lost, WorkerLane
from marserve.pool.dispatch.lanes import Lanes
from marserve.pool.dispatch.lengths.expected_wait import FreeOrder, RunTimes
from marserve.pool.dispatch.send_ahead import RoomAhead
from marserve.pool.options import PoolOptions


class Batches:
    """A worker has one batch, and those that were sent ahead."""

    serves_busy = False
    splits = True

    def __init__(self, options: PoolOptions, lanes: Lanes, batcher: Batcher, actions: Actions) -> None:
        self._options = options
        self._lanes = lanes
        self._batcher = batcher
        self._actions = actions
        self._run_times = RunTimes()
        self._free_order: FreeOrder | None = None
        self._room_ahead: RoomAhead | None = None
        if options.batch_policy != "fixed":
            self._room_ahead = RoomAhead()
            lanes.keep(self._room_ahead)
        self.rest = lanes.rest
        self.close = lanes.close

    def tickets(self, request: Request) -> int:
        """One request for each idle worker."""
        return len(self._lanes.idle)

    def expected_wait_s(self, priority: int, now: float) -> float | None:
        """0 while a worker is idle. `pool/dispatch/lengths/expected_wait.py` says how it is estimated."""
        if self._lanes.idle:
            return 0.0
        batcher = self._batcher
        run_s = self._run_times.typical_s
        if run_s is None:
            return None
        if self._free_order is None:  # made and kept up to date only once requests have deadlines
            self._free_order = FreeOrder()
            self._lanes.keep(self._free_order)
        batches = len(batcher.groups) + batcher.queue.before(priority) // batcher.max_batch_size
        return self._free_order.wait_s(batches, run_s, now)

    # ------------------------------------------------------------------------------------------- dispatch

    def dispatch(self, now: float) -> None:
        """Send what should leave now."""
        batcher, lanes = self._batcher, self._lanes
        if now >= batcher.priorities_until:
            batcher.forget_priorities()
        idle, queue = lanes.idle, batcher.queue
        while len(queue) or batcher.groups:
            is_ahead = not idle
            lane = self._lane_for_batch_ahead(now) if is_ahead else idle[-1]
            if lane is None or (chosen := batcher.next_batch(now, ahead=is_ahead)) is None:
                return
            if not is_ahead:
                idle.pop()
            flight = lanes.begin(lane, *chosen, now, 0, is_ahead)
            if batcher.guessed:
                self._ask_lengths(lane, flight)
            self._actions.send(lane.key, flight)

    def next_moment(self) -> float | None:
        """When a batch's delay is up."""
        has_idle = bool(self._lanes.idle)
        return self._batcher.next_wake(idle=has_idle, ahead=not has_idle and self._may_send_ahead())

    def _lane_for_batch_ahead(self, now: float) -> WorkerLane | None:
        """The least busy of the busy workers that may be sent another batch; None if it would not pay."""
        batcher, room = self._batcher, self._room_ahead
        best = room.least_busy(batcher.ahead_below_s) if room is not None else None
        return best if best is not None and batcher.pays_ahead(now) else None

    def _may_send_ahead(self) -> bool:
        return self._room_ahead is not None and self._room_ahead.has_any(self._batcher.ahead_below_s)

    def _ask_lengths(self, lane: WorkerLane, flight: Flight) -> None:
        """Ask for the lengths that the batcher only estimated, right before `flight`; one question at a time."""
        batcher = self._batcher
        guessed, batcher.guessed = batcher.guessed, []
        if lane.question is not None:
            return
        assert batcher.asked_lengths is not None  # the batcher estimates for it alone
        lane.question = batcher.asked_lengths.ask(guessed, flight.number, lane.mean_run_s)
        if lane.question is not None:
            self._actions.ask_lengths(lane.key, lane.question)

    # ------------------------------------------------------------------------------------------- ends

    def land(self, flight: Flight, handler_s: float, results: Sequence[Result], now: float) -> None:
        """Book the end of a flight."""
        lane = self._lanes.land(flight, handler_s, now)
        self._run_times.add(handler_s)
        if not lane.flights:
            self._lanes.rest(lane, now)

    def lost(self, lane: WorkerLane, loss: Loss, now: float) -> Lost:
        """Items that it had begun are run once more, as `Dispatcher.died` says.

        Without `may_retry` the oldest batch counts as begun: the worker was ended because of it; so it does where the
        worker may not have told. Of a worker that overlaps the batch ahead may have ended it as well, by its
        `preprocess`: it costs that batch no request, but it is run by itself from then on.
        """
        begun = loss.begun
        was_asked = self._lose_question(lane, begun)
        if lane.flights and (loss.began_oldest or not loss.may_retry) and not was_asked:
            begun = max(begun, lane.flights[0].number)
        may_retry = loss.may_retry and self._options.retry_on_worker_death
        failed: list[Job] = []
        again: list[Job] = []
        for flight in reversed(lane.flights):
            live = [job for job in flight.jobs if job.state is not JobState.DONE]
            if flight.number > begun:
                self._batcher.put_back(live, is_group=flight.is_group or (lane.overlaps and loss.is_suspect))
                continue
            for job in live:
                job.lost_worker(is_suspect=loss.is_suspect)
                moves = may_retry and job.deaths < MAX_DEATHS and not job.has_sent_pieces
                (again if moves else failed).append(job)
        return Lost(again[::-1], failed)

    def _lose_question(self, lane: WorkerLane, begun: int) -> bool:
        """Forget a dead worker's question. Returns whether it ended over that: then its batch is innocent."""
        question, lane.question = lane.question, None
        if question is None:
            return False
        assert self._batcher.asked_lengths is not None  # it asked
        was_asked = lane.flights[0].number == question.number > begun
        self._batcher.asked_lengths.lost(question, is_guilty=was_asked)
        return was_asked
