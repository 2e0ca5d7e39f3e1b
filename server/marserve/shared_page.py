"""The page of memory that a worker and the server share, for news while the worker is blocked in a batch.

The worker writes which batch it runs and since when; the server writes which items were cancelled. Every field is one
aligned 8-byte word, written by one side only, so no lock is needed. Knows no processes: the caller passes the mapped
descriptor in.

A worker may write any number anywhere in its page, so the server trusts none of them. But a worker cannot change the
size of the memory: without seals a handler that truncates the descriptor would make the server's next look at the page
a SIGBUS, which ends the server.

    word  written by
    0     worker     number of the batch being run, 0 between batches
    1     worker     when it began, seconds on the monotonic clock (a double)
    2     worker     batches finished
    3     agent      how far the server's monotonic clock is ahead of this machine's, seconds (a double); 0 if the same
    8…    server     16 slots of 17 words: a batch number, then one bit an item (the first 1,024)
    280   rank 0     in a group of ranks: the number of the handler's call that the next words belong to
    281   rank 0     how often the handler has asked in that call whether an item is cancelled
    282…  rank 0     for each of the first 230 items: the first of these questions with the answer yes, 0 without one
"""

from __future__ import annotations

import fcntl
import mmap
import os

PAGE_BYTES = 4096
SLOTS, SLOT_WORDS, FIRST_SLOT = 16, 17, 8
CALL, QUESTIONS, FIRST_YES = 280, 281, 282
MAX_CANCEL_INDEX = (SLOT_WORDS - 1) * 64


def create_page() -> int:
    """A descriptor of a fresh page of zeros, closed on exec unless passed on. The caller owns it.

    On Linux its size is sealed for good. Raises OSError if the system has no descriptors left, or cannot seal.
    """
    if not hasattr(os, "memfd_create"):  # macOS: an unlinked file does the same, but has no seals
        import tempfile  # here for a quicker start on Linux

        descriptor, path = tempfile.mkstemp(prefix="marserve-page-")
        os.unlink(path)
        os.ftruncate(descriptor, PAGE_BYTES)
        return descriptor
    descriptor = os.memfd_create("marserve-page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, PAGE_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class Page:
    """A mapped page. `close()` unmaps it; the descriptor stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._view = memoryview(self._map)
        self._words = self._view.cast("Q")
        self._doubles = self._view.cast("d")

    def close(self) -> None:
        """Unmap. The page must not be used afterwards."""
        self._words.release()
        self._doubles.release()
        self._view.release()
        self._map.close()

    # ------------------------------------------------------------------------------------- the worker's side

    def begin(self, number: int, now: float) -> None:
        """Batch `number` begins at `now`. The time is written first: a reader that sees the number sees its time."""
        self._doubles[1] = now
        self._words[0] = number

    def finish(self) -> None:
        """The batch has ended; nothing runs."""
        self._words[0] = 0
        self._words[2] += 1

    def count_finished(self) -> None:
        """A batch has ended while others run; `running` keeps the number of the batch that began last."""
        self._words[2] += 1

    @property
    def clock_ahead_s(self) -> float:
        """What to add to this machine's monotonic clock to get the server's, in seconds; 0 on the server's machine."""
        return self._doubles[3]

    def is_cancelled(self, number: int, index: int) -> bool:
        """Whether the server cancelled item `index` of batch `number`."""
        slot = FIRST_SLOT + number % SLOTS * SLOT_WORDS
        return (
            self._words[slot] == number
            and index < MAX_CANCEL_INDEX
            and bool(self._words[slot + 1 + index // 64] >> (index % 64) & 1)
        )

    def has_cancels(self, number: int) -> bool:
        """Whether any item of batch `number` was cancelled: one look for the common case."""
        return self._words[FIRST_SLOT + number % SLOTS * SLOT_WORDS] == number

    # ------------------------------------------------------------------------------------- between ranks

    def begin_call(self, number: int) -> None:
        """Rank 0 begins a call of the handler: clear the questions of the call before."""
        self._words[CALL] = 0
        if self._words[QUESTIONS]:
            self._words[QUESTIONS] = 0
            for word in range(FIRST_YES, PAGE_BYTES // 8):
                self._words[word] = 0
        self._words[CALL] = number

    def note_answer(self, index: int, is_cancelled: bool) -> bool:
        """Note the answer to a question of rank 0's handler: is item `index` cancelled? Returns it, for all ranks.

        For items beyond the page's room the answer is always no.
        """
        word = FIRST_YES + index
        is_yes = is_cancelled and word < PAGE_BYTES // 8
        question = self._words[QUESTIONS] + 1
        if is_yes and not self._words[word]:
            self._words[word] = question
        self._words[QUESTIONS] = question
        return is_yes

    def answer_of(self, number: int, question: int, index: int) -> bool | None:
        """The answer to the question of that number (from 1) in a call of rank 0's handler; None before it was asked.

        A cancelled item stays cancelled, so the first yes answers all later questions.
        """
        if self._words[CALL] != number or self._words[QUESTIONS] < question:
            return None
        word = FIRST_YES + index
        first_yes = self._words[word] if word < PAGE_BYTES // 8 else 0
        return 0 < first_yes <= question

    # ------------------------------------------------------------------------------------- the server's side

    @property
    def running(self) -> tuple[int, float]:
        """Number of the batch being run (0: none) and when it began."""
        return self._words[0], self._doubles[1]

    @property
    def finished(self) -> int:
        """How many batches the worker has finished."""
        return self._words[2]

    def mirror(self, running: int, began: float, finished: int) -> None:
        """Copy the state of a worker on another machine; `began` is on this machine's clock."""
        self._doubles[1] = began
        self._words[0] = running
        self._words[2] = finished

    def set_clock_ahead(self, seconds: float) -> None:
        """Write how far the server's monotonic clock is ahead, for a worker on another machine."""
        self._doubles[3] = seconds

    def cancel(self, number: int, index: int) -> None:
        """Mark item `index` of batch `number` as cancelled; items beyond the page's room are not marked."""
        if index >= MAX_CANCEL_INDEX:
            return
        slot = FIRST_SLOT + number % SLOTS * SLOT_WORDS
        if self._words[slot] != number:
            self._words[slot] = 0
            for word in range(slot + 1, slot + SLOT_WORDS):
                self._words[word] = 0
        self._words[slot + 1 + index // 64] |= 1 << (index % 64)
        self._words[slot] = number
