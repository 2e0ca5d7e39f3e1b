"""A closed-loop client: a few connections, each with one request at a time, as fast as the server answers.

For what must hold of every answer, however slow the machine: nothing waits but for the answer before it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

CONNECTIONS = 16
PATIENCE_S = 300.0


def ask_all(port: int, requests: Sequence[bytes]) -> list[tuple[int, bytes]]:
    """Status and body of each request's answer, in the order of the requests. Answers must have a length."""
    return asyncio.run(_ask_all(port, requests))


async def _ask_all(port: int, requests: Sequence[bytes]) -> list[tuple[int, bytes]]:
    answers: list[tuple[int, bytes]] = [(0, b"")] * len(requests)
    numbers = itertools.count()

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while (number := next(numbers)) < len(requests):
                writer.write(requests[number])
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
                answers[number] = int(head.split(b" ", 2)[1]), await reader.readexactly(length)
        finally:
            writer.close()
            await writer.wait_closed()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(ask())
    return answers
