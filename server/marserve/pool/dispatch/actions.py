"""What the pure side asks of the outside world."""

from __future__ import annotations

from typing import Protocol

from marserve.pool.dispatch.jobs import Flight, Question


# A protocol: workers lie above the dispatcher.
class Actions(Protocol):
    """What the dispatcher asks of the outside world. None of these may call back into the dispatcher."""

    def send(self, key: str, flight: Flight) -> None:
        """Send the flight's jobs to worker `key`."""

    def ask_lengths(self, key: str, question: Question) -> None:
        """Ask worker `key` for lengths; the batch of that number is sent to it next."""

    def mark_cancelled(self, key: str, number: int, index: int) -> None:
        """Tell worker `key` that item `index` of batch `number` is no longer wanted."""

    def hold(self, key: str) -> None:
        """Read nothing more from worker `key` until a client has taken what the worker streamed to it."""

    def resume(self, key: str) -> None:
        """Read again from worker `key`, if it still lives."""

    def lane_emptied(self, key: str) -> None:
        """A closed lane has nothing in flight any more: the worker may end."""

    def all_ended(self) -> None:
        """The last job was cancelled: nothing waits and nothing runs."""
