"""The living workers of one version: does what the dispatcher asks of them, and looks at their response limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from marserve.messages import Batch, Check, EndProfile, Profile
from marserve.pool.dispatch.jobs import Flight, Question
from marserve.pool.slots.hang_report import LOOK_BEFORE_S
from marserve.pool.slots.life import Life
from marserve.wire import Body

# The least time between two looks at the response limits.
MIN_WATCH_S = 0.02


class Lives:
    """The workers of one version by key: the `Actions` of its dispatcher. Does nothing for a worker that is gone.

    `all_ended` is called when a client that left took the last job with it.
    """

    def __init__(self, response_timeout_s: float, all_ended: Callable[[], None]) -> None:
        self.by_key: dict[str, Life] = {}
        self.all_ended = all_ended
        self._first_look_s = response_timeout_s - min(LOOK_BEFORE_S, response_timeout_s / 2)
        self._watch: asyncio.TimerHandle | None = None

    def send(self, key: str, flight: Flight) -> None:
        """Send a flight to the worker."""
        life = self.by_key.get(key)
        if life is not None:
            life.client.send(flight)
            if self._watch is None:
                self._begin_watch()

    def check(self, key: str, check: Check | Batch, bodies: Sequence[Body]) -> None:
        """Send a check to the worker, or a batch that is run again, which may be larger than others."""
        life = self.by_key.get(key)
        if life is not None:
            if isinstance(check, Batch):
                life.allow_batches_of(len(check.items))
            life.client.check(check, bodies)
            if self._watch is None:
                self._begin_watch()

    def requests_of(self, key: str) -> int:
        """How many requests the worker has answered; 0 for one that is gone."""
        life = self.by_key.get(key)
        return life.requests if life is not None else 0

    def profile(self, key: str, order: Profile | EndProfile) -> None:
        """Have the worker measure its batches, or end that."""
        life = self.by_key.get(key)
        if life is not None:
            life.client.profile(order)

    def ask_health(self, key: str, number: int) -> None:
        """Ask the worker whether it is well."""
        life = self.by_key.get(key)
        if life is not None:
            life.client.ask_health(number)
            if self._watch is None:
                self._begin_watch()

    def ask_lengths(self, key: str, question: Question) -> None:
        """Ask the worker for lengths."""
        life = self.by_key.get(key)
        if life is not None:
            life.client.ask_lengths(question)

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """Tell the worker that an item is not wanted any more."""
        life = self.by_key.get(key)
        if life is not None:
            life.mark_cancelled(number, index)

    def hold(self, key: str) -> None:
        """Read nothing more from the worker: a client does not keep up with what it streams."""
        life = self.by_key.get(key)
        if life is not None:
            life.hold()

    def resume(self, key: str) -> None:
        """Read from the worker again: its clients have caught up."""
        life = self.by_key.get(key)
        if life is not None:
            life.resume()

    def lane_emptied(self, key: str) -> None:
        """Stop the worker: it was retired, and its last batch has ended."""
        life = self.by_key.get(key)
        if life is not None:
            life.stop()

    def close(self) -> None:
        """Look at the response limits no more."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _begin_watch(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(self._first_look_s, self._check_time)

    def _check_time(self) -> None:
        """Look at every worker's response limit; look again when the next one may be due."""
        now = time.monotonic()
        dues = [life.check_time(now) for life in list(self.by_key.values())]
        waiting = [due for due in dues if due is not None]
        self._watch = (
            asyncio.get_running_loop().call_later(max(MIN_WATCH_S, min(waiting) - now), self._check_time)
            if waiting
            else None
        )
