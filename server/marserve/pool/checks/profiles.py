"""Has one worker of a version measure its batches while it serves: one profile at a time, within limits of time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marserve.errors import BadFrame, CannotProfile
from marserve.messages import EndProfile, Profile, Profiled
from marserve.pool.options import PoolOptions
from marserve.wire import Body

# Beyond the response limit of a batch that runs, how long a worker has to write what it recorded.
WRITES_WITHIN_S = 60.0

log = logging.getLogger("marserve.pool")


@dataclass(frozen=True)
class ProfileWish:
    """How long to measure: for so many requests (0: no number), at most so many seconds; and what to record."""

    requests: int
    seconds: float
    max_bytes: int
    shapes: bool = True
    memory: bool = False
    stacks: bool = False


@dataclass(frozen=True)
class TakenProfile:
    """What a worker measured. `worker` is its name; `others` are (name, requests, mean seconds a batch) of all."""

    worker: str
    profiled: Profiled
    traces: Sequence[bytes]
    others: Sequence[tuple[str, int, float]]


class Profiles:
    """The profiles of one version. `tell` sends a message to the worker of a key, `requests_of` counts its answers."""

    def __init__(
        self,
        options: PoolOptions,
        tell: Callable[[str, Profile | EndProfile], None],
        requests_of: Callable[[str], int],
    ) -> None:
        self._requests_of = requests_of
        self._requests_before = 0
        self._options = options
        self._tell = tell
        self._last = 0
        self._key = ""
        self._began = 0.0
        self._outcome: asyncio.Future[tuple[Profiled, Sequence[Body]]] | None = None

    @property
    def progress(self) -> tuple[float, int] | None:
        """For how many seconds a profile is being made, and how many requests it has; None while none is."""
        if self._outcome is None:
            return None
        return time.monotonic() - self._began, max(0, self._requests_of(self._key) - self._requests_before)

    def refuse_second(self) -> None:
        """Raise CannotProfile while a profile is made."""
        if self._outcome is not None:
            since = time.monotonic() - self._began
            raise CannotProfile(
                f"{self._options.model} {self._options.version} is being profiled since {since:.0f} s, one at a time: "
                "try again when that has ended."
            )

    async def run(self, key: str, wish: ProfileWish) -> tuple[Profiled, Sequence[Body]]:
        """Have the worker of that key measure. A caller that is cancelled has the worker drop what it measured.

        Raises CannotProfile if one runs, if the worker ends meanwhile, or does not answer.
        """
        self.refuse_second()
        name = f"{self._options.model} {self._options.version}"
        self._last += 1
        number = self._last
        outcome: asyncio.Future[tuple[Profiled, Sequence[Body]]] = asyncio.get_running_loop().create_future()
        self._key, self._began, self._outcome = key, time.monotonic(), outcome
        self._requests_before = self._requests_of(key)
        log.info("%s: worker %s is profiled", name, key)
        try:
            self._tell(key, Profile(number, wish.requests, wish.max_bytes, wish.shapes, wish.memory, wish.stacks))
            await asyncio.wait((outcome,), timeout=wish.seconds)
            if not outcome.done():
                self._tell(key, EndProfile(number))
                limit_s = self._options.response_timeout_s + WRITES_WITHIN_S
                await asyncio.wait((outcome,), timeout=limit_s)
                if not outcome.done():
                    self._tell(key, EndProfile(number, drop=True))
                    raise CannotProfile(
                        f"The worker of {name} did not end its profile within {limit_s:g} s: its batch still runs. "
                        "See what holds it with marserve logs, or profile a version whose batches end."
                    )
            return outcome.result()
        except asyncio.CancelledError:
            self._tell(key, EndProfile(number, drop=True))
            log.info("%s: the profile was given up, as its client went away", name)
            raise
        finally:
            self._outcome, self._key = None, ""

    def on_profiled(self, key: str, profiled: Profiled, bodies: Sequence[Body]) -> None:
        """A worker has ended its profile; one that was given up is dropped. Raises BadFrame for one never asked for."""
        if not 0 < profiled.number <= self._last or len(bodies) != len(profiled.traces):
            raise BadFrame(f"it sent profile {profiled.number} of {self._last} with {len(bodies)} traces")
        outcome = self._outcome
        if outcome is not None and key == self._key and profiled.number == self._last and not outcome.done():
            outcome.set_result((profiled, bodies))

    def lost(self, key: str, cause: str, detail: str) -> None:
        """A worker has ended, and the profile that it may have made with it."""
        outcome = self._outcome
        if outcome is not None and key == self._key and not outcome.done():
            said = f": {detail.rstrip('.')}" if detail else ""
            outcome.set_exception(
                CannotProfile(
                    f"The worker of {self._options.model} {self._options.version} that was profiled ended "
                    f"meanwhile ({cause}{said}), and what it had measured with it. Try again: another worker has taken "
                    "its place, or is about to."
                    if cause != "stopped"
                    else f"The worker of {self._options.model} {self._options.version} that was profiled was stopped "
                    "meanwhile: it was unregistered, scaled down, put to sleep or replaced. Profile what serves now."
                )
            )
