"""A thread that watches whether the event loop runs, and logs what holds it.

The loop beats (`loop_lag.py`); the thread looks at the beats. When one is late beyond the bound, it logs once where the
loop's thread is. It can end the process when the loop is held for too long, as no other part could then do it.

It sees nothing while a call keeps the interpreter from all threads; such a stall is logged when the call returns, with
the place that it returned to. If the call never returns, nothing in this process can act: probes from outside do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType

from marserve.telemetry.logs.line_ids import with_traceback
from marserve.telemetry.loop_lag import BEAT_S, Clocks, Finding, Held, LoopLag, Paused, Released, StallJudge, Stuck

log = logging.getLogger("marserve.loop")

# The exit status of a process that this ends.
STATUS = 70
# How often the thread looks, at most and at least; a quarter of the bound in between.
LOOK_EVERY_S = (0.02, 0.25)
# How much of a stack is logged: innermost frames, and other threads than the loop's.
MOST_FRAMES = 25
MOST_OTHERS = 3
# How long the log may take before the process is ended.
LAST_LOG_S = 5.0
# How long `stop` waits for the thread, which does nothing that takes longer.
_STOP_S = 1.0
# Files of Python in which a thread waits for work.
_WAITS = ("threading.py", "queue.py", "selectors.py", "thread.py")


class LoopWatch:
    """Watches the event loop of the thread that starts it.

    `stuck_after_s`: the process is ended when the loop has been held for so long; 0 for never. `flush` writes out the
    logs before, and may block; `end` ends the process with an exit status.
    """

    def __init__(
        self,
        lag: LoopLag,
        *,
        stuck_after_s: float = 0.0,
        flush: Callable[[], None] = lambda: None,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._lag = lag
        self._stuck_after_s = stuck_after_s
        self._flush, self._end = flush, end
        self._loop_thread = threading.main_thread()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    def start(self) -> None:
        """Begin to beat and to watch. Without a further thread (RuntimeError) there are beats, and a warning."""
        self._loop_thread = threading.current_thread()
        self._lag.restart(time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
        try:
            self._thread.start()
        except RuntimeError as error:
            log.warning("No thread can watch the event loop (%s): what holds it is not logged", error)

    def stop(self) -> None:
        """Beat and watch no more; the thread has ended when this returns."""
        if self._timer is not None:
            self._timer.cancel()
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _beat(self) -> None:
        self._lag.beat(time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    # ------------------------------------------------------------------------------------------- on its thread

    def _watch(self) -> None:
        lag = self._lag
        least, most = LOOK_EVERY_S
        every_s = min(most, max(least, lag.threshold_s / 4))
        with contextlib.ExitStack() as ends:
            loop, own = (_Times(thread, ends) for thread in (self._loop_thread, threading.current_thread()))

            def read() -> Clocks:
                return Clocks(*loop.read(), own.read()[1], time.process_time())

            judge = StallJudge(
                time.monotonic(),
                read(),
                threshold_s=lag.threshold_s,
                every_s=every_s,
                stuck_after_s=self._stuck_after_s,
            )
            while not self._stopped.wait(every_s):
                long = lag.take_long()
                due, now = lag.due, time.monotonic()
                for finding in judge.look(now, due, long, read()):
                    try:
                        self._tell(finding)
                    except Exception:  # the watch must go on
                        log.exception("The watch of the event loop failed")

    def _tell(self, finding: Finding) -> None:
        if isinstance(finding, Held):
            self._tell_held(finding)
        elif isinstance(finding, Released):
            self._lag.note_stall(finding.stall, finding.held_s)
            if finding.was_told:
                log.warning("The event loop runs again, after %.2f s", finding.held_s)
            else:
                log.warning(
                    "The event loop stood still for %.2f s; it ran on before its place was read", finding.held_s
                )
        elif isinstance(finding, Paused):
            self._lag.note_pause(finding.seconds)
            log.warning(
                "This process did not run for %.2f s: it was stopped, the machine was suspended, or others had its "
                "processors. Requests waited so long, and nothing in the server held them",
                finding.seconds,
            )
        else:
            self._tell_stuck(finding)

    def _tell_held(self, held: Held) -> None:
        self._lag.note_held(held.since)
        frames = sys._current_frames()
        stack = _stack(frames, self._loop_thread.ident)
        sentence = "The event loop stands still, for %.2f s now: no request is read or answered meanwhile. "
        if held.by_others:
            sentence += "Its thread hardly ran (%.2f s), while others had the interpreter; their places are below"
            times: tuple[float, ...] = (held.cpu_s,)
            stack = "\n".join([stack, *_others(frames, self._loop_thread.ident)])
        else:
            sentence += "Its thread ran for %.2f s and waited for a processor for %.2f s; its place is below"
            times = (held.cpu_s, held.wait_s)
        log.warning(sentence, held.seconds, *times, extra=with_traceback(stack))

    def _tell_stuck(self, stuck: Stuck) -> None:
        said = (
            f"The event loop has stood still for {stuck.seconds:.1f} s, and abort_when_stuck is "
            f"{self._stuck_after_s:g} s: marserve ends now, with exit status {STATUS}"
        )

        def write() -> None:
            stack = _stack(sys._current_frames(), self._loop_thread.ident)
            log.critical("%s", said, extra=with_traceback(stack))
            self._flush()

        # On a thread of its own: the loop's may hold a lock of the log, and a file system may hang.
        writing = threading.Thread(target=write, name="loop-watch-log", daemon=True)
        try:
            writing.start()
            writing.join(LAST_LOG_S)
        except RuntimeError:
            pass
        os.write(2, f"{said}\n".encode())
        self._end(STATUS)


class _Times:
    """Reads how long a living thread ran, and how long it waited for a processor, in seconds."""

    def __init__(self, thread: threading.Thread, ends: contextlib.ExitStack) -> None:
        """What it opens is closed by `ends`."""
        self._thread = thread
        self._file: int | None = None
        with contextlib.suppress(OSError):  # Linux, if it keeps such figures
            self._file = os.open(f"/proc/self/task/{thread.native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            ends.callback(os.close, self._file)

    def read(self) -> tuple[float, float]:
        """Both, so far. Where the system does not say the first is the thread's, or the process's, the second 0."""
        if self._file is not None:
            with contextlib.suppress(OSError, ValueError):
                ran, waited = os.pread(self._file, 100, 0).split()[:2]
                return int(ran) / 1e9, int(waited) / 1e9
        if self._thread.ident is not None and hasattr(time, "pthread_getcpuclockid"):
            return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)), 0.0
        return time.process_time(), 0.0


def _stack(frames: Mapping[int, FrameType], loop_thread: int | None) -> str:
    """Where the loop's thread is."""
    frame = frames.get(loop_thread or 0)
    if frame is None:
        return "The event loop's thread runs no Python code"
    return f"Stack of the event loop's thread (most recent call last):\n{_calls(frame)}"


def _calls(innermost: FrameType) -> str:
    """The calls that have led to a frame, it last; the outermost ones are left out if there are many."""
    calls = traceback.StackSummary.extract(traceback.walk_stack(innermost), limit=MOST_FRAMES)
    calls.reverse()
    return "".join(calls.format()).rstrip()


def _others(frames: Mapping[int, FrameType], loop_thread: int | None) -> list[str]:
    """Where other threads are that do not wait for work: those that may have kept the interpreter."""
    names = {each.ident: each.name for each in threading.enumerate()}
    busy = [
        (ident, frame)
        for ident, frame in frames.items()
        if ident not in (loop_thread, threading.get_ident())
        and os.path.basename(frame.f_code.co_filename) not in _WAITS
    ]
    return [
        f"Stack of {names.get(ident, 'another thread')} (most recent call last):\n{_calls(frame)}"
        for ident, frame in busy[:MOST_OTHERS]
    ]
