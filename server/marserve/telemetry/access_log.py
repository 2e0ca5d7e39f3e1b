"""The access log: one line a request, as TorchServe writes it. Knows no HTTP objects and formats no times.

`access_line` makes the line, `AccessLog.write` puts it in line together with the time; a thread does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from marserve.telemetry.line_writer import LineWriter

AccessRecord = tuple[float, str]

# A request line may have 8 KiB; a log of such lines would be a way to fill memory while nobody reads it.
_MAX_TARGET = 2048


def access_line(
    peer: str, method: str, target: str, protocol: str, status: int, milliseconds: float, request_id: str = ""
) -> str:
    """One request as text: `/127.0.0.1:64003 "POST /predictions/noop HTTP/1.1" 200 118`, and its id if it is given.

    `peer` is `host:port` (empty for a Unix socket), `target` the path with its query as the client wrote it,
    `protocol` for example `HTTP/1.1`.
    """
    if '"' in target:
        target = target.replace('"', "%22")
    if len(target) > _MAX_TARGET:
        target = target[:_MAX_TARGET] + "…"
    line = f'/{peer} "{method} {target} {protocol}" {status} {milliseconds:.0f}'
    return f"{line} {request_id}" if request_id else line


class AccessLog:
    """Takes lines and passes them to its writers; with none, nothing is logged.

    `has_ids` tells who makes the lines whether each is to end with its request's id.
    """

    def __init__(self, writers: Sequence[LineWriter[AccessRecord]] = (), *, has_ids: bool = False) -> None:
        self._writers = tuple(writers)
        self.has_ids = has_ids

    @property
    def is_on(self) -> bool:
        """Whether anybody writes: if not, the line need not be made."""
        return bool(self._writers)

    def write(self, line: str) -> None:
        """Put a line in line, or drop it where there is no room. Never blocks; well under a microsecond a writer."""
        record = (time.time(), line)
        for writer in self._writers:
            writer.write(record)
