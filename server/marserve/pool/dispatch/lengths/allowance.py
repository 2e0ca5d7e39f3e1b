"""How much of the time that workers are busy may be spent on questions and checks. Pure."""

from __future__ import annotations

BUSY_SHARE = 0.01


MOST_SAVED_S = 10.0


class Allowance:
    """A purse of seconds: it earns a share of busy seconds, up to `most_s`, and what is spent comes out of it."""

    def __init__(self, share: float = BUSY_SHARE, most_s: float = MOST_SAVED_S) -> None:
        self.share = share
        self.left_s = 0.0
        self._most_s = most_s

    def earn(self, busy_s: float) -> None:
        """Workers were busy for so long."""
        self.left_s = min(self._most_s, self.left_s + self.share * busy_s)

    def affords(self, expected_s: float) -> bool:
        """Whether something that is expected to take so long can be paid."""
        return 0.0 < expected_s <= self.left_s

    def spend(self, spent_s: float) -> None:
        """So long it took; more than there was is a debt."""
        self.left_s -= spent_s
