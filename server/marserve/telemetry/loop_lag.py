"""How late the event loop is, and when it stood still. Pure: times are passed in.

The loop beats every `BEAT_S`; a beat that comes late says that something held the loop since it was due. `LoopLag`
keeps what the beats say, and belongs to the loop's thread. A watchdog's thread looks from time to time, also while no
beat comes, and `StallJudge` says what it sees. A process that was stopped, or got no processor, is late as a whole: the
watchdog sees that it was late itself while the process used no processor time, and blames no part of the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from marserve.telemetry.metrics.histogram import Histogram

BEAT_S = 0.1
# A beat that is later than this is kept, for requests that ask whether the loop stood still while they waited.
KEPT_ABOVE_S = 0.05
# How many late beats are kept.
KEPT = 512
LAG_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
# A watchdog that is so much later than it meant to be was itself kept from running.
_LATE_LOOK_S = 0.1
# The share of a gap in which the process used processor time, if it ran at all.
_RAN_SHARE = 0.5


class Interval(NamedTuple):
    """From when to when, in seconds of the monotonic clock."""

    begin: float
    end: float


class LoopLag:
    """What the loop's beats said. The loop's thread writes it, and the watchdog's by the methods `note_…`.

    `lag_seconds` is how late beats were. `stalls` counts times that the loop stood still longer than its bound,
    `stalled_seconds` sums them and `longest_s` is the longest; `pauses` counts times that the whole process did not
    run, `paused_seconds` sums them. `due` is when the next beat is.
    """

    def __init__(self, now: float, threshold_s: float) -> None:
        self.threshold_s = threshold_s
        self.lag_seconds = Histogram(LAG_BOUNDS)
        self.stalls = self.pauses = 0
        self.stalled_seconds = self.longest_s = self.paused_seconds = 0.0
        self.due = now + BEAT_S
        self._late: deque[Interval] = deque(maxlen=KEPT)
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
            late = Interval(due, now)
            self._late.append(late)
            if lag >= self.threshold_s:
                self._long.append(late)
        self.due = now + BEAT_S

    def overlap(self, begin: float, end: float) -> float:
        """How many seconds between these two times the loop stood still, as far back as is kept (512 late beats).

        Delays below `KEPT_ABOVE_S` are not counted, and each begins up to `BEAT_S` later than the truth. Times in which
        the whole process did not run are in it. For the loop's thread.
        """
        seconds = 0.0
        for late in reversed(self._late):
            if late.end <= begin:
                break
            seconds += max(0.0, min(end, late.end) - max(begin, late.begin))
        return seconds

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


LAG_TEXT = "How late the event loop was, at a tenth of a second each."

FAMILIES: tuple[tuple[str, str, str, str, Callable[[LoopLag], Mapping[str, float]]], ...] = (
    (
        "marserve_loop_stalls_total",
        "counter",
        "Times that the event loop stood still longer than loop_stall_threshold: held by a call, or as the whole "
        "process did not run (paused).",
        "cause",
        lambda lag: {"held": lag.stalls, "paused": lag.pauses},
    ),
    (
        "marserve_loop_stalled_seconds_total",
        "counter",
        "Seconds of those stalls.",
        "cause",
        lambda lag: {"held": lag.stalled_seconds, "paused": lag.paused_seconds},
    ),
    (
        "marserve_loop_longest_stall_seconds",
        "gauge",
        "The longest time that a call held the event loop since the start.",
        "",
        lambda lag: {"": lag.longest_s},
    ),
)


class Held(NamedTuple):
    """Something holds the loop, and has for so long. `by_others`: its own thread hardly ran, others did."""

    since: float
    seconds: float
    cpu_s: float
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

    def __init__(self, now: float, *, threshold_s: float, every_s: float, stuck_after_s: float = 0.0) -> None:
        self._threshold_s, self._every_s, self._stuck_after_s = threshold_s, every_s, stuck_after_s
        self._looked_at = now
        self._loop_cpu_s = self._process_cpu_s = 0.0
        self._pauses: deque[Interval] = deque(maxlen=64)
        # Processor seconds of the loop's thread and of the process, each when the beat that is awaited was due.
        self._since: tuple[float, float, float] | None = None
        self._is_told = False

    def look(
        self, now: float, due: float, long: Iterable[Interval], *, loop_cpu_s: float, process_cpu_s: float
    ) -> list[Finding]:
        """Look at the beats: `due` is when the next one is, `long` are those that came too late since the last look.

        `long` has to be read before `due`. `loop_cpu_s` and `process_cpu_s` are the processor time that the loop's
        thread and the process have used.
        """
        found: list[Finding] = []
        gap_s = now - self._looked_at
        before = self._loop_cpu_s, self._process_cpu_s
        if gap_s - self._every_s > _LATE_LOOK_S and process_cpu_s - before[1] < gap_s * _RAN_SHARE:
            self._pauses.append(Interval(self._looked_at, now))
            if gap_s >= self._threshold_s:
                found.append(Paused(gap_s))
        self._looked_at, self._loop_cpu_s, self._process_cpu_s = now, loop_cpu_s, process_cpu_s
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
            self._since = (due, *before)
        if held_s >= self._threshold_s and not self._is_told:
            self._is_told = True
            _, loop_before, process_before = self._since
            cpu_s, all_s = loop_cpu_s - loop_before, process_cpu_s - process_before
            found.append(Held(due, held_s, cpu_s, cpu_s < held_s * _RAN_SHARE <= all_s))
        if self._stuck_after_s and held_s >= self._stuck_after_s:
            found.append(Stuck(held_s))
        return found

    def _held_s(self, begin: float, end: float) -> float:
        """The time between the two, less what the process did not run."""
        paused_s = sum(max(0.0, min(end, pause.end) - max(begin, pause.begin)) for pause in self._pauses)
        return end - begin - paused_s
