"""An archive that the server sends to an agent, in parts, into a file."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from marserve.agent_link import ArchiveRef
from marserve.errors import MarserveError


class Receiver:
    """Takes one archive at a time. `ask` has the server send the one with this digest."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._file: BinaryIO | None = None
        self._failed: OSError | None = None
        self._ended: asyncio.Future[str] | None = None
        self._closed = ""

    async def receive(self, ref: ArchiveRef, path: Path) -> None:
        """Have the archive sent into this file. Raises OSError where it cannot be written, MarserveError otherwise."""
        if self._closed:
            raise MarserveError(f"{ref.name} cannot be had on this node: {self._closed}")
        self._ended, self._failed = asyncio.get_running_loop().create_future(), None
        try:
            with path.open("wb", buffering=0) as self._file:
                self._ask(ref.sha256)
                reason = await self._ended
        finally:
            self._file = self._ended = None
        if self._failed is not None:
            raise self._failed
        if reason:
            raise MarserveError(f"{ref.name} cannot be had on this node: {reason}")

    def take(self, part: bytes) -> None:
        """Write a part. After one that cannot be written the rest is dropped, since the server still sends it."""
        if self._file is None or self._failed is not None:
            return
        try:
            left = memoryview(part)
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._failed = error

    def end(self, reason: str) -> None:
        """End the file: the last part has come, or for `reason` no more will."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(reason)

    def close(self, reason: str) -> None:
        """Refuse this archive and every later one, for this reason."""
        self._closed = reason
        self.end(reason)
