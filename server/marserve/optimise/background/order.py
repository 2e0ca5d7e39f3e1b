"""What the server tells the process that searches, and what that answers.

The order comes on standard input, behind eight bytes with its length. The input stays open: its end is the server's.
Answers are lines of JSON on standard output.
"""

from __future__ import annotations

from typing import BinaryIO, Final

import msgspec

from marserve.optimise.taken import Taken

# In the folder that the order names: what is kept (`WHOLE`, with its `RESULT`), and what the process needs meanwhile.
WHOLE: Final = "whole"
RESULT: Final = "result.json"
TEMPORARY: Final = "tmp"
PRINTED: Final = "printed"
# The lowest priority there is, as `nice` has it.
LOWEST: Final = 19


class Order(msgspec.Struct, frozen=True):
    """Search for a faster build of a version. `folder` is where it is put; `share` is of one core.

    `priority` is the highest one that the search has, as `nice` has it.
    """

    taken: Taken
    folder: str
    share: float
    batch_size: int
    threads: int
    within_s: float
    memory_bytes: int
    priority: int = LOWEST

    def write(self) -> bytes:
        """Its bytes."""
        data = msgspec.msgpack.encode(self)
        return len(data).to_bytes(8, "big") + data


def read_order(file: BinaryIO) -> Order:
    """The order of this process's server. Raises EOFError if that has ended."""
    size = int.from_bytes(file.read(8), "big")
    data = file.read(size)
    if not size or len(data) < size:
        raise EOFError
    return msgspec.msgpack.decode(data, type=Order)


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the process: the `step` that it begins; at last that it is `done`, or why it `failed`."""

    step: str = ""
    is_done: bool = False
    failed: str = ""
