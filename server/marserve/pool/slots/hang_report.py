"""What a worker was doing when its time was up: busy in a long batch, waiting for something, or stopped.

The limit alone decides that a worker is ended. The report says what the process's state and processor time looked like,
for the error and the log. The judgement is pure; `read_sample` reads `/proc`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# How long before the limit the first of the two looks is taken, at most.
LOOK_BEFORE_S = 1.0
_BUSY, _ASLEEP = 0.5, 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at a process: when (monotonic seconds), its state's letter, processor seconds used since its start."""

    at: float
    state: str
    cpu_s: float


def read_sample(pid: int, now: float, proc: Path = Path("/proc")) -> Sample | None:
    """Look at a process; None where `/proc` cannot be read."""
    try:
        return parse_stat((proc / str(pid) / "stat").read_text(), now, os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None


def parse_stat(text: str, now: float, ticks_per_s: int) -> Sample:
    """A look from the text of `/proc/PID/stat`. Raises ValueError or IndexError for other texts."""
    # The second field is the program's name in parentheses and may hold anything, spaces and parentheses too.
    fields = text[text.rindex(")") + 1 :].split()
    return Sample(now, fields[0], (int(fields[11]) + int(fields[12])) / ticks_per_s)


def describe_hangs(firsts: Sequence[Sample | None], lasts: Sequence[Sample | None], ran_s: float | None) -> str:
    """As `describe_hang`, for each process of a group of ranks; looks are in the order of the ranks."""
    several = len(lasts) > 1
    padded = [*firsts, *[None] * (len(lasts) - len(firsts))]
    sentences = [describe_hang(first, last, ran_s) for first, last in zip(padded, lasts, strict=False)]
    return "; ".join(f"rank {rank}: {words}" if several else words for rank, words in enumerate(sentences) if words)


def describe_hang(first: Sample | None, last: Sample | None, ran_s: float | None) -> str:
    """What the worker was doing, in a sentence without a full stop; empty where nothing is known.

    `first` and `last` are two looks, the second at the limit. `ran_s` is how long it has been in the handler with the
    batch, None if it never began it.
    """
    if last is None:
        return ""
    if last.state in "Tt":
        return f"the process is stopped (state {last.state}): a signal or a debugger holds it"
    if last.state == "D":
        return "the process waits inside the kernel (state D), for a disk or a device"
    batch = "it never began the batch" if ran_s is None else f"the batch has run for {ran_s:.1f} s"
    if first is None or last.at <= first.at:
        return batch
    span_s = last.at - first.at
    share = max(0.0, last.cpu_s - first.cpu_s) / span_s
    used = f"it used {share:.0%} of a core in the last {span_s:.1f} s"
    # A process in state R wants to run: it is busy even if a crowded machine gives it little time.
    if share >= _BUSY or last.state == "R":
        word = "busy in a long batch" if ran_s is not None else "busy with something else"
    elif share <= _ASLEEP:
        word = "wedged, waiting for something that does not come"
    else:
        word = "slow"
    return f"{word}: {batch}, and {used}"
