"""Notices that this machine is to be taken away: a file that appears, an installed plug-in that reports it, a signal.

A thread for each file and plug-in polls it. The server's end does not wait for these threads, so a notice that answers
slowly or never delays nothing. Only the first notice is reported.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from marserve.app.building.cannot_start import CannotStart
from marserve.plugins import PreemptionNotice, find_preemption_notices
from marserve.settings import Settings

log = logging.getLogger("marserve.app")


class FileNotice:
    """A file that appears."""

    def __init__(self, path: Path) -> None:
        self.where = f"the file {path}"
        self._path = path

    def notice(self) -> str | None:
        """A sentence once the file has appeared, else None. Raises OSError if that cannot be seen."""
        try:
            self._path.stat()
        except FileNotFoundError:
            return None
        return "it has appeared"


class Preemption:
    """Polls all notices every `interval_s`, from `start` to `stop`. Calls `tell` on the event loop, at most once."""

    def __init__(self, notices: Sequence[PreemptionNotice], interval_s: float, tell: Callable[[str], None]) -> None:
        self._notices = notices
        self._interval_s = interval_s
        self._tell = tell
        self._is_over = threading.Event()

    def start(self) -> None:
        """Begin to poll; `tell` is called on the running event loop."""
        loop = asyncio.get_running_loop()
        for notice in self._notices:
            log.info("Asks every %g s whether this machine is to go: %s", self._interval_s, notice.where)
            threading.Thread(target=self._ask, args=(notice, loop), name="preemption", daemon=True).start()

    def stop(self) -> None:
        """Stop polling, without waiting for a call under way."""
        self._is_over.set()

    def _ask(self, notice: PreemptionNotice, loop: asyncio.AbstractEventLoop) -> None:
        has_failed = False
        while not self._is_over.is_set():
            try:
                announced = notice.notice()
            except Exception as error:
                # A plug-in may raise anything; the server goes on and polls it again.
                if not has_failed:
                    log.warning(
                        "%s could not be asked (%s: %s); asked again", notice.where, type(error).__name__, error
                    )
                has_failed = True
            else:
                if has_failed:
                    log.info("%s answers again", notice.where)
                has_failed = False
                if announced is not None:
                    self._announce(f"This machine is to go: {notice.where}: {announced}", loop)
                    return
            self._is_over.wait(self._interval_s)

    def _announce(self, sentence: str, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            loop.call_soon_threadsafe(self._tell, sentence)


def find_notices(settings: Settings) -> list[PreemptionNotice]:
    """The notices that settings and installed packages name. Raises CannotStart, BadSettings."""
    notices: list[PreemptionNotice] = []
    path = settings.preemption_file
    if path is not None:
        if path.exists():
            raise CannotStart(
                f"preemption_file is {str(path)!r}, and that file is there already: this machine is to go, or the "
                "notice is an old one. Remove the file to start all the same."
            )
        notices.append(FileNotice(path))
    return notices + find_preemption_notices()


def notice_signal(settings: Settings) -> signal.Signals | None:
    """The signal that means the same; None if none is set. Raises CannotStart if the system has no such signal."""
    name = settings.preemption_signal
    if name == "none":
        return None
    if name not in signal.Signals.__members__:
        raise CannotStart(f"preemption_signal is {name}, and this system has no such signal; choose another.")
    return signal.Signals[name]
