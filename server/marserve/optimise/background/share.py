"""How long a family of processes has to pause, so that it keeps to a share of a core. Pure."""

from __future__ import annotations


class Share:
    """A budget of processor time that grows by `share` seconds a second, from `now` on."""

    def __init__(self, share: float, now: float, used_s: float = 0.0) -> None:
        """`used_s` is the processor time that the family had used before."""
        self._share = share
        self._began = now
        self._before_s = used_s

    def debt_s(self, now: float, used_s: float) -> float:
        """The seconds for which it is to pause; negative while it may go on."""
        used_s -= self._before_s
        return used_s / self._share - (now - self._began)

    def forgive(self, now: float, used_s: float) -> None:
        """Begin anew: what was not used does not count, so that a pause is never followed by a burst."""
        if self.debt_s(now, used_s) < 0:
            self._began, self._before_s = now, used_s
