"""The access log: one line a request, as TorchServe writes it.

`access_line` makes the line, `AccessLog.write` queues it together with the time, and a thread does the rest. At a
hundred thousand requests a second that thread would keep the interpreter from the event loop for most of the time. So
`TextAccessLog` makes the finished text itself: of all lines of one step of the loop at once, and the part before a line
only once a millisecond.
"""

from __future__ import annotations

import asyncio
import re
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from marserve.telemetry.logs.line_writer import LineWriter

AccessRecord = tuple[float, str]

# A request line may have 8 KiB; buffered lines of that length would fill memory while the log cannot be written.
_MAX_TARGET = 2048
# Lines that are put in line together; where there is no room they are dropped together.
_LINES_TOGETHER = 64
# Characters that would end the quotes or the line, or control a terminal. They are percent-encoded, octet by octet.
_UNFIT = re.compile(r'["\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')


def access_line(
    peer: str, method: str, target: str, protocol: str, status: int, milliseconds: float, request_id: str = ""
) -> str:
    """One request as text: `/127.0.0.1:64003 "POST /predictions/noop HTTP/1.1" 200 118`, and its id if it is given.

    `peer` is `host:port` (empty for a Unix socket), `target` the path with its query as the client wrote it,
    `protocol` for example `HTTP/1.1`.
    """
    line = f'/{peer} "{method} {legible(target)} {protocol}" {status} {milliseconds:.0f}'
    return f"{line} {request_id}" if request_id else line


def legible(target: str) -> str:
    """A request's target for a line: bounded, and without characters that would end its quotes or the line."""
    if '"' in target or not target.isprintable():
        target = _UNFIT.sub(lambda found: quote(found[0], safe="", encoding="latin-1", errors="replace"), target)
    return target if len(target) <= _MAX_TARGET else target[:_MAX_TARGET] + "…"


class Sampling(NamedTuple):
    """Which requests have a line: all that failed or took `slow_ms`, and a `share` of the others, 0 to 1.

    The request's id decides, so that servers behind each other keep the same requests, whichever pattern they come in.
    """

    share: float
    slow_ms: float

    def is_always(self, milliseconds: int, *, has_failed: bool) -> bool:
        """Whether a request has a line whatever its id is."""
        return has_failed or milliseconds >= self.slow_ms

    def keeps(self, request_id: str, milliseconds: int, *, has_failed: bool) -> bool:
        """Whether a request has a line."""
        if has_failed or milliseconds >= self.slow_ms:
            return True
        return zlib.crc32(request_id.encode()) < self.share * 0x1_0000_0000


class AccessLog:
    """Takes lines and passes them to its writers; with none, nothing is logged.

    `has_ids` says whether each line has to end with its request's id. With `sampling` the caller asks it for each
    request, before it makes the line; None: every request has one. The caller ensures that nothing in a line breaks
    it; the log does not check.
    """

    def __init__(
        self,
        writers: Sequence[LineWriter[AccessRecord]] = (),
        *,
        has_ids: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        self._writers = tuple(writers)
        self.has_ids = has_ids
        self.sampling = sampling

    @property
    def is_on(self) -> bool:
        """Whether there is a writer; if not, the line need not be made."""
        return bool(self._writers)

    def write(self, line: str) -> None:
        """Put a line in line, or drop it where there is no room. Never blocks; well under a microsecond a writer."""
        record = (time.time(), line)
        for writer in self._writers:
            writer.write(record)

    def flush(self) -> None:
        """Put in line what is held back; nothing is here."""


class TextAccessLog(AccessLog):
    """An access log whose writers get finished text: a head, which is made once a millisecond, and the line.

    Lines of one step of the running loop are put in line together, at its end; without a loop each is at once. `heads`
    makes the head for each writer from a time in milliseconds since the epoch. For one thread only.
    """

    def __init__(
        self,
        writers: Sequence[LineWriter[AccessRecord]],
        heads: Callable[[int], Sequence[str]],
        *,
        has_ids: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__(writers, has_ids=has_ids, sampling=sampling)
        self._make_heads = heads
        self._outlets: list[tuple[Callable[[str, int], None], str, str]] = []
        self._since = self._until = 0.0
        self._step: list[str] = []

    def write(self, line: str) -> None:
        """Put a line in line, or drop it where there is no room. Never blocks; well under a microsecond a writer."""
        step = self._step
        step.append(line)
        if len(step) == 1:
            try:
                asyncio.get_running_loop().call_soon(self.flush)
            except RuntimeError:  # there is none
                self.flush()
        elif len(step) == _LINES_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Put in line what this step has brought so far."""
        step = self._step
        if not step:
            return
        self._step = []
        now = time.time()
        if not self._since <= now < self._until:  # a clock may also be set back
            self._begin_millisecond(int(now * 1000))
        for write_lines, head, between in self._outlets:
            write_lines(head + between.join(step), len(step))

    def _begin_millisecond(self, at_ms: int) -> None:
        self._since, self._until = at_ms / 1000, (at_ms + 1) / 1000
        heads = self._make_heads(at_ms)
        self._outlets = [
            (writer.write_lines, head, f"\n{head}") for writer, head in zip(self._writers, heads, strict=True)
        ]
