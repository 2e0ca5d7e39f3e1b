"""Cuts what a client sends into slices of few frames, so that no read holds the event loop for long. Pure."""

from __future__ import annotations

from typing import Final

# HTTP/2's first words, and what stands before each frame.
PREFACE_BYTES: Final = 24
FRAME_HEADER_BYTES: Final = 9


class Slices:
    """The place in what one client sends. `most` is how many frames may begin in a slice; none is looked into."""

    __slots__ = ("_most", "_rest")

    def __init__(self, most: int) -> None:
        self._most = most
        # Bytes until the next frame begins; first come HTTP/2's first words.
        self._rest = PREFACE_BYTES

    def cut(self, data: bytes) -> tuple[int, int]:
        """Where a slice of `data` ends, which goes on where the last one ended, and how many frames begin in it.

        A frame may end beyond the slice. What is left is given again, with what follows it.
        """
        at, frames, end = self._rest, 0, len(data)
        while frames < self._most and at + FRAME_HEADER_BYTES <= end:
            at += FRAME_HEADER_BYTES + (data[at] << 16 | data[at + 1] << 8 | data[at + 2])
            frames += 1
        self._rest = max(0, at - end)
        return min(at, end), frames
