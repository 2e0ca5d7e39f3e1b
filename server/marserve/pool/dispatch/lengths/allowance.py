"""How much of the time that workers are busy may be spent on questions and checks. Pure."""

from __future__ import annotations

BUSY_SHARE = 0.01


MOST_SAVED_S = 10.0


class Allowance:
    """A budget in seconds: a share of the seconds that workers are busy, saved up to `most_s`."""

    def __init__(self, share: float = BUSY_SHARE, most_s: float = MOST_SAVED_S) -> None:
        self.share = share
        self.left_s = 0.0
        self._most_s = most_s

    def earn(self, busy_s: float) -> None:
        """Add the share of `busy_s`."""
        self.left_s = min(self._most_s, self.left_s + self.share * busy_s)

    def affords(self, expected_s: float) -> bool:
        """Whether something that is expected to take so long fits into the budget."""
        return 0.0 < expected_s <= self.left_s

    def spend(self, spent_s: float) -> None:
        """Take `spent_s` out; the budget may become negative."""
        self.left_s -= spent_s
