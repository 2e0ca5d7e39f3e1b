"""A terminal whose keys are read as they are pressed. It is as before after every way out: the end, Ctrl-C, Ctrl-Z.

While it is held the terminal is in the state that termios calls cbreak: no echo, no waiting for the end of a line; the
keys for signals go on to work. Signals that end or stop the process are noted, and wake whoever waits for a key.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import tty
from collections.abc import Callable
from types import FrameType
from typing import Final, Self

_ARROWS: Final = {b"A": "up", b"B": "down", b"C": "right", b"D": "left"}
_NOTED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


def keys_in(data: bytes) -> list[str]:
    """The keys in what a terminal sent: characters, `up`, `down`, `left`, `right`, `escape`. Others are left out."""
    keys: list[str] = []
    text = data
    while text:
        if text[:1] != b"\x1b":
            end = text.find(b"\x1b")
            plain, text = (text, b"") if end < 0 else (text[:end], text[end:])
            keys += [letter for letter in plain.decode("utf-8", "ignore") if letter.isprintable()]
        elif text[1:2] in (b"[", b"O"):
            end = 2
            while end < len(text) and not 0x40 <= text[end] <= 0x7E:
                end += 1
            if end == 2 and text[end : end + 1] in _ARROWS:
                keys.append(_ARROWS[text[end : end + 1]])
            text = text[end + 1 :]
        else:
            keys.append("escape")
            text = text[1:]
    return keys


class Terminal:
    """The terminal at `descriptor`, as a context that holds it. `show` and `hide` take the screen and give it back."""

    def __init__(self, descriptor: int, show: Callable[[], None], hide: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._show, self._hide = show, hide
        self._noted: list[int] = []
        self._is_held = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._wakes, self._wake = os.pipe()
            stack.callback(os.close, self._wakes)
            stack.callback(os.close, self._wake)
            for end in (self._wakes, self._wake):
                os.set_blocking(end, False)
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False))
            for number in _NOTED:
                stack.callback(signal.signal, number, signal.signal(number, self._note))
            self._before = termios.tcgetattr(self._descriptor)
            stack.callback(self._release)
            self._hold()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def wake(self) -> None:
        """Have `wait` return. For other threads."""
        with contextlib.suppress(OSError):  # full, which wakes as well, or closed
            os.write(self._wake, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """The keys that were pressed, at once if there are any; empty after the time, a signal, or `wake`.

        Raises KeyboardInterrupt for Ctrl-C, SystemExit for a signal that ends the process, and EOFError when the
        terminal is gone.
        """
        ready, _, _ = select.select([self._descriptor, self._wakes], [], [], timeout_s)
        if self._wakes in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakes, 4096)
        self._heed()
        if self._descriptor not in ready:
            return []
        try:
            data = os.read(self._descriptor, 4096)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        return keys_in(data)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)

    def _heed(self) -> None:
        noted, self._noted = self._noted, []
        if signal.SIGINT in noted:
            raise KeyboardInterrupt
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number in noted:
                raise SystemExit(128 + number)
        if signal.SIGTSTP in noted:
            self._stop()

    def _stop(self) -> None:
        """Stop this process as Ctrl-Z does, with the terminal as it was, and go on when it is continued."""
        self._release()
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)
        # A shell may have changed the terminal meanwhile: that is what it is given back.
        self._before = termios.tcgetattr(self._descriptor)
        self._hold()

    def _hold(self) -> None:
        if not self._is_held:
            self._is_held = True
            tty.setcbreak(self._descriptor, termios.TCSADRAIN)
            self._show()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            try:
                self._hide()
            finally:
                with contextlib.suppress(termios.error):  # the terminal is gone
                    termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
