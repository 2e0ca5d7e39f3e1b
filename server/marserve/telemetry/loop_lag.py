"""How late the event loop is, and when it stood still. Pure: times are passed in.

The loop beats every `BEAT_S`; a beat that comes late says that something held the loop since it was due. `LoopLag`
keeps what the beats say, and belongs to the loop's thread. A watchdog's thread looks from time to time, also while no
beat comes, and `StallJudge` says what it sees. A process that was stopped, or got no processor, is late as a whole: the
watchdog sees that it was late itself, and why, and blames no part of the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from marserve.telemetry.happenings import Happenings
from marserve.telemetry.metrics.histogram import Histogram

BEAT_S = 0.1
# A beat that is later than this is a happening: requests that waited meanwhile are explained by it.
KEPT_ABOVE_S = 0.05
# How many beats beyond the bound are kept for the watchdog.
KEPT = 512
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# A watchdog that is so much later than it meant to be was itself kept from running.
_LATE_LOOK_S = 0.1
# The share of that time in which it waited for a processor, if others had them; or in which the loop's thread ran or
# waited for one, if that thread kept the interpreter.
_MOST = 0.5
# The share in which the process used processor time, if any other of its threads kept the interpreter: it may have got
# little of a busy machine.
_SOME = 0.1


class Interval(NamedTuple):
    """From when to when, in seconds of the monotonic clock."""

    begin: float
    end: float


class LoopLag:
    """What the loop's beats said. The loop's thread writes it, and the watchdog's by the methods `note_…`.

    `lag_seconds` is how late beats were. `stalls` counts times that the loop stood still longer than its bound,
    `stalled_seconds` sums them and `longest_s` is the longest; `pauses` counts times that the whole process did not
    run, `paused_seconds` sums them. `due` is when the next beat is. Late beats are `happenings`, each from when it was
    due, which is up to `BEAT_S` later than the truth.
    """

    def __init__(self, now: float, threshold_s: float, happenings: Happenings | None = None) -> None:
        self.threshold_s = threshold_s
        self.lag_seconds = Histogram(LAG_BOUNDS)
        self.stalls = self.pauses = 0
        self.stalled_seconds = self.longest_s = self.paused_seconds = 0.0
        self.due = now + BEAT_S
        self._happenings = happenings or Happenings()
        self._long: deque[Interval] = deque(maxlen=KEPT)
        self._last: Interval | None = None
        self._held_since: float | None = None

    def restart(self, now: float) -> None:
        """The beats begin, or begin again."""
        self.due = now + BEAT_S

    def beat(self, now: float) -> None:
        """The loop runs."""
        due = self.due
        lag = max(0.0, now - due)
        self.lag_seconds.observe(lag)
        if lag >= KEPT_ABOVE_S:
            self._happenings.note("stall", due, now, "the server's event loop stood still")
            if lag >= self.threshold_s:
                self._long.append(Interval(due, now))
        self.due = now + BEAT_S

    def take_long(self) -> list[Interval]:
        """Take the late beats beyond the bound that were not taken yet. For the watchdog's thread."""
        taken = []
        while self._long:
            taken.append(self._long.popleft())
        return taken

    def note_held(self, since: float) -> None:
        """Something holds the loop, or held it until now: `note_stall` follows."""
        self._held_since = since

    def note_stall(self, stall: Interval, held_s: float) -> None:
        """Count a time in which something held the loop: `held_s` of it, without pauses of the process."""
        self.stalls += 1
        self.stalled_seconds += held_s
        self.longest_s = max(self.longest_s, held_s)
        self._last, self._held_since = stall, None

    def note_pause(self, seconds: float) -> None:
        """Count a time in which the process did not run."""
        self.pauses += 1
        self.paused_seconds += seconds

    def last_stall(self, now: float, within_s: float) -> Interval | None:
        """The last time that something held the loop, if it ended at most `within_s` ago. For the loop's thread."""
        since = self._held_since
        if since is not None and within_s:  # the loop runs again, and the watchdog has not seen it yet
            return Interval(since, now)
        last = self._last
        return last if last is not None and now - last.end < within_s else None


FAMILIES: tuple[tuple[str, Callable[[LoopLag], Mapping[str, float]]], ...] = (
    ("marserve_loop_stalls_total", lambda lag: {"held": lag.stalls, "paused": lag.pauses}),
    ("marserve_loop_stalled_seconds_total", lambda lag: {"held": lag.stalled_seconds, "paused": lag.paused_seconds}),
    ("marserve_loop_longest_stall_seconds", lambda lag: {"": lag.longest_s}),
)


class Clocks(NamedTuple):
    """Processor time that was used, and for which a thread waited while others had the processors, so far.

    Waiting is 0 where the system does not say. `own_wait_s` is that of the watchdog's thread.
    """

    loop_cpu_s: float = 0.0
    loop_wait_s: float = 0.0
    own_wait_s: float = 0.0
    process_cpu_s: float = 0.0


class Held(NamedTuple):
    """Something holds the loop, and has for so long. `by_others`: its own thread hardly ran, others did.

    Its thread used `cpu_s` of a processor in that time, and waited for one for `wait_s`.
    """

    since: float
    seconds: float
    cpu_s: float
    wait_s: float
    by_others: bool


class Released(NamedTuple):
    """The loop runs again. `held_s` is how long it was held; `was_told`: a `Held` came before."""

    stall: Interval
    held_s: float
    was_told: bool


class Paused(NamedTuple):
    """The process did not run for so long."""

    seconds: float


class Stuck(NamedTuple):
    """The loop has been held for longer than it may be."""

    seconds: float


Finding = Held | Released | Paused | Stuck


class StallJudge:
    """Says what a watchdog sees that looks every `every_s`. `stuck_after_s` is 0 for never."""

    def __init__(
        self,
        now: float,
        clocks: Clocks = Clocks(),  # noqa: B008 - never changed
        *,
        threshold_s: float,
        every_s: float,
        stuck_after_s: float = 0.0,
    ) -> None:
        self._threshold_s, self._every_s, self._stuck_after_s = threshold_s, every_s, stuck_after_s
        self._looked_at, self._clocks = now, clocks
        self._pauses: deque[Interval] = deque(maxlen=64)
        # The awaited beat, and the clocks before it was due.
        self._since: tuple[float, Clocks] | None = None
        self._is_told = False

    def look(self, now: float, due: float, long: Iterable[Interval], clocks: Clocks) -> list[Finding]:
        """Look at the beats: `due` is when the next one is, `long` are those that came too late since the last look.

        `long` has to be read before `due`.
        """
        found: list[Finding] = []
        gap_s, before = now - self._looked_at, self._clocks
        if self._has_paused(gap_s - self._every_s, before, clocks):
            self._pauses.append(Interval(self._looked_at, now))
            if gap_s >= self._threshold_s:
                found.append(Paused(gap_s))
        self._looked_at, self._clocks = now, clocks
        for stall in long:
            held_s = self._held_s(stall.begin, stall.end)
            was_told, self._is_told = self._is_told, False
            if was_told or held_s >= self._threshold_s:
                found.append(Released(stall, held_s, was_told))
        held_s = self._held_s(due, now)
        if held_s <= 0:
            self._since, self._is_told = None, False
            return found
        if self._since is None or self._since[0] != due:
            self._since = (due, before)
        if held_s >= self._threshold_s and not self._is_told:
            self._is_told = True
            found.append(self._held(due, held_s, self._since[1], clocks))
        if self._stuck_after_s and held_s >= self._stuck_after_s:
            found.append(Stuck(held_s))
        return found

    def _has_paused(self, late_s: float, before: Clocks, clocks: Clocks) -> bool:
        """Whether the process did not run while the watchdog did not, which is that late."""
        if late_s <= _LATE_LOOK_S:
            return False
        if clocks.own_wait_s - before.own_wait_s >= _MOST * late_s:
            return True
        # Before a pause the process may have run for as long as the watchdog meant to sleep.
        loop_s = clocks.loop_cpu_s + clocks.loop_wait_s - before.loop_cpu_s - before.loop_wait_s - self._every_s
        all_s = clocks.process_cpu_s - before.process_cpu_s - self._every_s
        return loop_s < _MOST * late_s and all_s < _SOME * late_s

    def _held(self, due: float, held_s: float, before: Clocks, clocks: Clocks) -> Held:
        cpu_s, wait_s = clocks.loop_cpu_s - before.loop_cpu_s, clocks.loop_wait_s - before.loop_wait_s
        others_s = clocks.process_cpu_s - before.process_cpu_s - cpu_s
        return Held(due, held_s, cpu_s, wait_s, others_s > cpu_s + wait_s and others_s > _SOME * held_s)

    def _held_s(self, begin: float, end: float) -> float:
        """The time between the two, less what the process did not run."""
        paused_s = sum(max(0.0, min(end, pause.end) - max(begin, pause.begin)) for pause in self._pauses)
        return end - begin - paused_s
