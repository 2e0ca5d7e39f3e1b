"""What is tuned: how a version is laid out, how its batches are formed, and what shall become better. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32)
DELAYS_S: Final = (0.0, 0.002, 0.01)
# Of a version whose policy finds the size of batches: bounds of it.
BOUNDS: Final = (8, 32, 64)
PADDINGS: Final = (0.1, 0.25, 0.5, 0.75)
KEPT: Final = -1.0
FOUND: Final = -1.0
_GOAL = re.compile(r"p(50|90|95|99)=(\d+(?:\.\d+)?)(ms|s)").fullmatch


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """A version, by how many workers it is served, of how many threads. What a batch costs depends on this alone.

    `threads` are those inside of one operator; 0: as they are, which are not tuned. `padding` is the part of a batch
    that may be padding where inputs differ in length; costs do not depend on it. `KEPT`: it is not tuned.
    """

    workers: int
    version: str = ""
    threads: int = 0
    padding: float = KEPT

    def __str__(self) -> str:
        many = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        threads = f" of {self.threads} thread{'' if self.threads == 1 else 's'}" if self.threads else ""
        padding = "" if self.padding == KEPT else f", padding {self.padding:g}"
        return f"{self.version}, {many}{threads}{padding}" if self.version else f"{many}{threads}{padding}"

    @property
    def build(self) -> tuple[str, int, float]:
        """What is registered; it is loaded anew for another one."""
        return self.version, self.threads, self.padding


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """A layout, and how its batches are formed; a delay of `FOUND` is none, where a policy finds their size."""

    layout: Layout
    batch_size: int
    delay_s: float

    def __str__(self) -> str:
        of = f"{self.layout}, batches of {self.batch_size}"
        return of if self.delay_s == FOUND else f"{of}, {1000 * self.delay_s:g} ms"


@dataclass(frozen=True, slots=True)
class Goal:
    """The highest rate of requests, of which a `share` is answered within `seconds`; None: the highest rate at all."""

    share: float = 0.99
    seconds: float | None = None

    def __str__(self) -> str:
        return "rate" if self.seconds is None else f"p{self.share * 100:g}={self.seconds * 1000:g}ms"


def read_goal(word: str) -> Goal:
    """`rate`, or `p99=50ms`. Raises ValueError."""
    if word == "rate":
        return Goal()
    found = _GOAL(word.strip())
    if found is None or float(found[2]) <= 0:
        raise ValueError(f"--goal is {word!r}; it is rate, or a percentile with its time, such as p99=50ms")
    return Goal(int(found[1]) / 100, float(found[2]) * (0.001 if found[3] == "ms" else 1.0))


def layouts(
    version: str, workers: Sequence[int], threads: Sequence[int], *, cores: int, always: Collection[Layout] = ()
) -> list[Layout]:
    """The layouts of these numbers whose threads do not outnumber the processors by much, and `always`.

    A number that is too large beside any other stays with the smallest of the others.
    """
    least_threads, least_workers = min(threads), min(workers)
    fitting = [
        Layout(count, version, each)
        for count in workers
        for each in threads
        if count * each <= cores or each == least_threads or count == least_workers
    ]
    return sorted({*fitting, *always})


def space(
    layouts: Sequence[Layout], batch_sizes: Sequence[int] = BATCH_SIZES, delays_s: Sequence[float] = DELAYS_S
) -> list[Setting]:
    """All settings. Batches of one never wait, so that their delay makes no difference."""
    return [
        Setting(layout, size, delay_s)
        for layout in layouts
        for size in batch_sizes
        for delay_s in (delays_s if size > 1 else delays_s[:1])
    ]
