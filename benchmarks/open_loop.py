"""Sends requests when they are due, whether earlier ones were answered or not, and measures from when they were due.

A closed loop waits for the server and so never sees what waiting costs. Some hundred requests a second are well within
what this can send; it says so itself when it was late.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from load_generator import CannotMeasure

MOST_LATE_S = 0.02


@dataclass(slots=True)
class Sent:
    """What came of a run: (due, time to answer) in seconds from its begin, and how many were refused."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    refused: int = 0

    def percentile(self, share: float, *, since: float = 0.0) -> float:
        """The time that this share of those due from `since` on were answered within; refused ones count as never."""
        spans = sorted(latency for due, latency in self.latencies if due >= since)
        spans += [float("inf")] * self.refused
        return spans[min(len(spans) - 1, int(share * len(spans)))]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests are due that know nothing of each other."""
    dice, now, dues = random.Random(seed), 0.0, []
    while (now := now + dice.expovariate(rate)) < seconds:
        dues.append(now)
    return dues


def bursty(rate: float, seconds: float, seed: int) -> list[float]:
    """The same on average, but for 0.1 s at 2.2 times the rate, then for 0.2 s at 0.4 times, and so on."""
    dice, now, dues = random.Random(seed), 0.0, []
    while now < seconds:
        for span, factor in ((0.1, 2.2), (0.2, 0.4)):
            due = now
            while (due := due + dice.expovariate(factor * rate)) < now + span:
                dues.append(due)
            now += span
    return dues


def send(port: int, path: str, dues: Sequence[float], bodies: Sequence[bytes]) -> Sent:
    """Send each body when it is due. Raises CannotMeasure when this machine is too slow to do so."""
    return asyncio.run(_send(port, path, dues, bodies))


async def _send(port: int, path: str, dues: Sequence[float], bodies: Sequence[bytes]) -> Sent:
    sent = Sent()
    free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    late: list[float] = []
    begun = time.monotonic() + 0.05

    async def one(due: float, body: bytes) -> None:
        connection = free.pop() if free else await asyncio.open_connection("127.0.0.1", port)
        reader, writer = connection
        writer.write(
            b"POST %s HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        if head.split(b" ", 2)[1] == b"200":
            sent.latencies.append((due, time.monotonic() - begun - due))
        else:
            sent.refused += 1
        free.append(connection)

    async with asyncio.TaskGroup() as group:
        for due, body in zip(dues, bodies, strict=True):
            wait_s = begun + due - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            late.append(time.monotonic() - begun - due)
            group.create_task(one(due, body))
    for _, writer in free:
        writer.close()
    if sorted(late)[int(0.95 * len(late))] > MOST_LATE_S:
        raise CannotMeasure("the machine is too busy to send requests when they are due")
    return sent
