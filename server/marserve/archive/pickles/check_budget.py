"""How much a check of one archive may do: operations, counted over all files, and a word that it is to end.

`CheckBudget.spend` counts what costs about a microsecond. Every thousand operations it asks whether the check is to
end, and sleeps for a moment: a thread that waits for the interpreter's lock otherwise gets it only every 5 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: What all pickles of one archive may do together: some ten seconds of a processor.
MAX_OPERATIONS = 10_000_000

_BETWEEN_LOOKS = 1024
_PAUSE_S = 0.0001


class Overspent(Exception):
    """The operations are used up; the text says so, for a message."""


class CheckStopped(Exception):
    """The check is to end, as the server does."""


def _never() -> bool:
    return False


class CheckBudget:
    """Counts down operations. `is_stopped` is asked now and then, in the thread that checks."""

    def __init__(self, operations: int | None = None, is_stopped: Callable[[], bool] = _never) -> None:
        self._left = MAX_OPERATIONS if operations is None else operations
        self._until_look = _BETWEEN_LOOKS
        self._is_stopped = is_stopped
        self._whole = self._left

    def spend(self, operations: int = 1) -> None:
        """Count so many. Raises Overspent when there are no more, CheckStopped when the check is to end."""
        self._left -= operations
        self._until_look -= operations
        if self._left < 0:
            raise Overspent(f"the pickles of the archive have more than {self._whole} operations together")
        if self._until_look <= 0:
            self._until_look = _BETWEEN_LOOKS
            if self._is_stopped():
                raise CheckStopped
            time.sleep(_PAUSE_S)
