"""How waiting requests are given to workers: a part that the dispatcher asks. `make_mode` chooses.

batches              one batch after the other, and one ahead where that pays
steps_and_sequences  workers that keep a state between calls: sequences, continuous batching
coroutines           workers that run many requests at once

A mode books what begins and what ends, and decides what becomes of a dead worker's jobs. It ends no job and calls no
receiver, with one exception: `tell_pieces` passes the pieces of a step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from marserve.messages import Request, Result
from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.batcher import Batcher
from marserve.pool.dispatch.jobs import Flight, Loss, Lost, WorkerLane
from marserve.pool.dispatch.lanes import Lanes
from marserve.pool.dispatch.modes.batches import Batches
from marserve.pool.dispatch.modes.coroutines import Coroutines
from marserve.pool.dispatch.modes.steps_and_sequences import StepsAndSequences
from marserve.pool.options import PoolOptions

__all__ = ["Batches", "Coroutines", "Mode", "StepsAndSequences", "make_mode"]


# A protocol: its modes have no code in common.
class Mode(Protocol):
    """What differs between batches, steps, sequences and coroutines."""

    @property
    def serves_busy(self) -> bool:
        """Whether a request may leave at once even if no worker is idle."""

    @property
    def splits(self) -> bool:
        """Whether a batch that raised may be run again in halves."""

    def tickets(self, request: Request) -> int:
        """How many requests like this one the workers would take at this moment."""

    def expected_wait_s(self, priority: int, now: float) -> float | None:
        """How long a request that comes now would wait for its answer; None if unknown."""

    def dispatch(self, now: float) -> None:
        """Send what should leave now."""

    def next_moment(self) -> float | None:
        """When time alone may give `dispatch` something to do; None for never."""

    def rest(self, lane: WorkerLane, now: float) -> None:
        """A worker has nothing in flight."""

    def close(self, lane: WorkerLane) -> bool:
        """Give a worker nothing more. Returns whether it is gone at once; else `Actions.lane_emptied` follows."""

    def land(self, flight: Flight, handler_s: float, results: Sequence[Result], now: float) -> None:
        """Book the end of a flight; `results` are empty if it raised. Raises BadFrame as `Lanes.land`."""

    def lost(self, lane: WorkerLane, loss: Loss, now: float) -> Lost:
        """A worker is gone. Puts the jobs that it had not begun back into the queue."""


def make_mode(options: PoolOptions, lanes: Lanes, batcher: Batcher, actions: Actions) -> Mode:
    """The mode that these options ask for."""
    if options.is_concurrent:
        return Coroutines(options, lanes, batcher, actions)
    if options.sequences is not None or options.continuous_batching:
        return StepsAndSequences(options, lanes, batcher, actions)
    return Batches(options, lanes, batcher, actions)
