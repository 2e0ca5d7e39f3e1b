"""Versions that were taken off the list and stay loaded for a while, so that going back to them is only a switch.

They get no new requests, and answer those that they had accepted. Each is given up once: when its time is over, when
another model needs its memory, when a caller gives it up, or when the server stops. It then ends like any other version
that leaves.
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
    """A kept version. `until` is in seconds on the clock of `Keeping`; `of` is the digest of the state it served."""

    version: Version
    until: float
    of: str


class Keeping:
    """The kept versions of one registry. Everything here is called on the event loop and awaits nothing."""

    def __init__(
        self, window_s: float, end: Callable[[list[Version]], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        """A version is kept for `window_s`, with 0 not at all; `end` begins to end versions."""
        self.window_s = window_s
        self._end = end
        self._now = now
        self._kept: dict[Version, Kept] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def all(self) -> list[Kept]:
        """The versions kept now, the earliest first."""
        return list(self._kept.values())

    def left_s(self, kept: Kept) -> float:
        """The seconds for which it will still be kept."""
        return max(0.0, kept.until - self._now())

    def find(self, model: str, name: str) -> Kept | None:
        """The latest kept version of this name that could answer at once."""
        for kept in reversed(self._kept.values()):
            if (kept.version.model, kept.version.name) == (model, name) and is_fit(kept.version):
                return kept
        return None

    def keep(self, versions: Iterable[Version], of: str) -> list[Version]:
        """Keep versions that have just left the list; returns those that are not kept, for the caller to end."""
        others = []
        for version in versions:
            # With `onCrash: fail` the crash of a version that gets no requests would end the server.
            has_use = is_fit(version) and version.facts.options.on_crash != "fail" and version.facts.is_operators
            if self.window_s <= 0 or self._is_closed or not has_use:
                others.append(version)
                continue
            self._put(Kept(version, self._now() + self.window_s, of))
            log.info("Model %s version %s stays loaded for %g s", version.model, version.name, self.window_s)
        return others

    def take(self, kept: Kept) -> Version:
        """Stop keeping a version that is to serve again; its time does not run out any more."""
        del self._kept[kept.version]
        kept.version.pool.make_spare(None)
        self._set_timer()
        return kept.version

    def put_back(self, kept: Kept) -> None:
        """Keep a taken version again, which does not serve after all."""
        if self._is_closed:
            self._end([kept.version])
        else:
            self._put(kept)

    def give_up(self, versions: Iterable[Version], why: str) -> None:
        """Begin to end those of these versions that are kept."""
        ending = [version for version in versions if self._kept.pop(version, None) is not None]
        for version in ending:
            version.pool.make_spare(None)
            log.info("Model %s version %s is not kept any longer: %s", version.model, version.name, why)
        self._set_timer()
        if ending:
            self._end(ending)

    def look(self) -> None:
        """Give up the versions whose time is over."""
        now = self._now()
        self.give_up([kept.version for kept in self.all() if kept.until <= now], "the undo window is over")

    def close(self) -> None:
        """Give up all versions, and keep none from now on."""
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
    """Whether it could answer at once: `min_workers` are ready, or it sleeps and a request would wake it."""
    return version.can_answer and version.pool.ready_workers >= version.min_workers
