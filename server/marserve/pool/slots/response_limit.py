"""Whether a worker is past its response limit: the time that a batch may take.

The limit runs from the batch's begin, which the shared page shows, and anew from each piece of a stream. For a batch
that is not begun it runs from its sending, or from the answer to the one before. After the batch has ended in the
worker its answer has the same time again to be read. `life.py` kills a worker that is past it,
`restart_policy.py` decides when the next one starts, and `slot.py` starts it.
"""

from __future__ import annotations

from collections.abc import Sequence

from marserve.pool.dispatch.jobs import Flight
from marserve.pool.slots.hang_report import LOOK_BEFORE_S, Sample, describe_hangs, read_sample
from marserve.pool.worker_end.cause_of_death import Cause, Death
from marserve.shared_page import Page


class ResponseLimit:
    """The response limit of one worker. Times are monotonic seconds.

    `heard_at` is when the worker last sent something; `is_held`: it is not read, since a client is slow, and
    `resumed_at` is when it was last read again.
    """

    def __init__(self, limit_s: float) -> None:
        self.heard_at = 0.0
        self.is_held = False
        self.resumed_at = 0.0
        self._limit_s = limit_s
        self._awaited_number = 0
        self._first_look_at = 0.0
        self._first_looks: list[Sample | None] = []

    def look(
        self, now: float, flight: Flight, page: Page, pids: Sequence[int], *, quiet_since: float | None, is_asked: bool
    ) -> float | Death:
        """When to look again; a Death if the worker is past the limit with `flight`, its oldest batch.

        `quiet_since` is for a worker that runs many batches at once: since when it has sent nothing about one of them.
        `is_asked`: it was asked for lengths. Shortly before the limit, and at it, the processes are looked at.
        """
        limit_s = self._limit_s
        if self.is_held:  # the worker waits for a slow client, which the connection's own limit ends
            self.heard_at = now
            return now + limit_s
        if quiet_since is not None:
            due = max(quiet_since, self.resumed_at) + limit_s
            if now < due:
                return due
            return Death(Cause.RESPONSE_TIMEOUT, f"no answer to one of its requests in responseTimeout, {limit_s:g} s")
        number, began = page.running
        since = began if number == flight.number and flight.sent_at <= began <= now else flight.sent_at
        due = max(since, self.heard_at) + limit_s
        if now < due:
            look_at = due - min(LOOK_BEFORE_S, limit_s / 2)
            if now < look_at:
                return look_at
            if self._first_look_at < look_at:
                self._first_look_at = now
                self._first_looks = [read_sample(pid, now) for pid in pids]
            return due
        if page.finished >= flight.number > self._awaited_number:
            self._awaited_number = flight.number
            self.heard_at = now
            return now + limit_s
        # The worker may write any number into the page: an impossible time is ignored.
        ran_s = now - max(began, flight.sent_at) if number == flight.number and began <= now else None
        doing = describe_hangs(self._first_looks, [read_sample(pid, now) for pid in pids], ran_s)
        detail = f"no answer within responseTimeout, {limit_s:g} s"
        if is_asked and number != flight.number:
            detail += ", when the handler's length_of was asked"
        return Death(Cause.RESPONSE_TIMEOUT, f"{detail}; {doing}" if doing else detail)
