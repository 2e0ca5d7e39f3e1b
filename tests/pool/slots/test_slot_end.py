"""Tests for the line about a worker that has ended."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from marserve.messages import Request
from marserve.pool.slots.slot import name_requests
from support.running_pool import RunningPool

pytestmark = pytest.mark.anyio

EXITS = """
import os
def handle(data, context):
    if data:
        os._exit(3)
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """As the server runs: on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((), ""),
        (("a",), "; it had request a"),
        (("a~1", "a~2", "b"), "; it had requests a, b"),
        (("a", "b", "c"), "; it had requests a, b, c"),
        (tuple("abcde"), "; it had requests a, b, c and 2 more"),
    ],
)
def test_a_few_requests_are_named_and_the_others_counted(ids: tuple[str, ...], words: str) -> None:
    """Parts of one request are one."""
    assert name_requests([Request(each, []) for each in ids]) == words


async def test_the_line_of_a_dead_worker_names_model_and_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In its text, which a terminal shows without the columns of a log."""
    async with RunningPool(tmp_path, EXITS, retry_on_worker_death=False) as running:
        await running.start()
        with caplog.at_level(logging.WARNING, "marserve.pool"):
            sent = running.send(b"x")
            await sent.told(60)

    assert caplog.messages[0] == (
        "W-9000-m_1.0 ended (exit): the worker's process ended by itself with exit status 3; it had request "
        f"{sent.job.request.id}"
    )
