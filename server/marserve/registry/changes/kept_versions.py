"""Versions that were taken off the list and stay loaded for a while, so that going back to them is only a switch.

They get no requests; what they had accepted they answer. Each is given up, once, when its time is over, when its memory
is wanted for another, when somebody says so, or when the server stops; then it ends as any version does that leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from marserve.registry.catalogue.versions import Version

log = logging.getLogger("marserve.registry")


@dataclass(frozen=True, slots=True)
class Kept:
    """One of them. `until` is in seconds on the clock of `Keeping`; `of` is the digest of the state that it served."""

    version: Version
    until: float
    of: str


class Keeping:
    """The kept versions of one registry. Everything here is called on the event loop and awaits nothing."""

    def __init__(
        self, window_s: float, end: Callable[[list[Version]], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`window_s` is how long a version is kept, 0 for not at all; `end` begins to end versions."""
        self.window_s = window_s
        self._end = end
        self._now = now
        self._kept: dict[Version, Kept] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def all(self) -> list[Kept]:
        """Those that are kept now, longest first."""
        return list(self._kept.values())

    def left_s(self, kept: Kept) -> float:
        """How long one will still be kept."""
        return max(0.0, kept.until - self._now())

    def find(self, model: str, name: str) -> Kept | None:
        """The kept version of this name that could answer at once; of several the latest."""
        for kept in reversed(self._kept.values()):
            if (kept.version.model, kept.version.name) == (model, name) and is_fit(kept.version):
                return kept
        return None

    def keep(self, versions: Iterable[Version], of: str) -> list[Version]:
        """Keep versions that have just left the list; gives those that are not kept, which are the caller's to end."""
        others = []
        for version in versions:
            # A crash that is to end the server must not come from a version that nobody asks.
            has_use = is_fit(version) and version.facts.options.on_crash != "fail" and version.facts.workflow is None
            if self.window_s <= 0 or self._is_closed or not has_use:
                others.append(version)
                continue
            self._put(Kept(version, self._now() + self.window_s, of))
            log.info("Model %s version %s stays loaded for %g s", version.model, version.name, self.window_s)
        return others

    def take(self, kept: Kept) -> Version:
        """It is to serve again: its time does not run out any more."""
        del self._kept[kept.version]
        kept.version.pool.make_spare(None)
        self._set_timer()
        return kept.version

    def put_back(self, kept: Kept) -> None:
        """It does not serve again after all."""
        if self._is_closed:
            self._end([kept.version])
        else:
            self._put(kept)

    def give_up(self, versions: Iterable[Version], why: str) -> None:
        """Begin to end these; those that are not kept are passed over."""
        ending = [version for version in versions if self._kept.pop(version, None) is not None]
        for version in ending:
            version.pool.make_spare(None)
            log.info("Model %s version %s is not kept any longer: %s", version.model, version.name, why)
        self._set_timer()
        if ending:
            self._end(ending)

    def look(self) -> None:
        """Give those up whose time is over."""
        now = self._now()
        self.give_up([kept.version for kept in self.all() if kept.until <= now], "the undo window is over")

    def close(self) -> None:
        """Give all of them up, and keep none from now on."""
        self._is_closed = True
        self.give_up(list(self._kept), "the server stops")

    def _put(self, kept: Kept) -> None:
        version = kept.version
        self._kept[version] = kept
        version.pool.make_spare(lambda: self.give_up([version], "its memory is wanted"))
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._kept:
            first = min(kept.until for kept in self._kept.values())
            self._timer = asyncio.get_running_loop().call_later(max(0.0, first - self._now()), self.look)


def is_fit(version: Version) -> bool:
    """Whether it could answer at once: all the workers that it should have, or it sleeps and may be woken."""
    return version.can_answer and version.pool.ready_workers >= version.min_workers
