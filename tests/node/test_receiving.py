"""Tests for archives that come from the server in parts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from marserve.agent_link import ArchiveRef
from marserve.errors import MarserveError
from marserve.node.receiving import Receiver

REF = ArchiveRef("0" * 64, "m.mar")

pytestmark = pytest.mark.anyio


async def begin(receiver: Receiver, path: Path) -> asyncio.Task[None]:
    """Receive into this file; returns when the server was asked."""
    task = asyncio.create_task(receiver.receive(REF, path))
    await asyncio.sleep(0)
    return task


async def test_parts_become_the_file_in_their_order(tmp_path: Path) -> None:
    """The server is asked once, by the digest; parts before and after are nobody's."""
    asked: list[str] = []
    receiver = Receiver(asked.append)
    receiver.take(b"too early")
    task = await begin(receiver, tmp_path / "archive")

    receiver.take(b"one ")
    receiver.take(b"two")
    receiver.end("")
    await task
    receiver.take(b"too late")

    assert asked == [REF.sha256]
    assert (tmp_path / "archive").read_bytes() == b"one two"


async def test_a_server_that_has_none_says_why() -> None:
    """The error has the archive's name and its reason."""
    receiver = Receiver(lambda sha256: None)
    task = await begin(receiver, Path("/dev/null"))
    receiver.end("the server has no file of it")

    with pytest.raises(MarserveError, match=r"m\.mar cannot be had on this node: the server has no file of it"):
        await task


async def test_a_full_disk_is_told_when_the_last_part_has_passed(tmp_path: Path) -> None:
    """So that parts that are still on their way are not taken for those of the next try."""
    receiver = Receiver(lambda sha256: None)
    task = await begin(receiver, Path("/dev/full"))
    receiver.take(b"one")
    await asyncio.sleep(0)
    assert not task.done()
    receiver.take(b"two")
    receiver.end("")
    with pytest.raises(OSError, match="No space left"):
        await task

    again = await begin(receiver, tmp_path / "archive")
    receiver.take(b"three")
    receiver.end("")
    await again
    assert (tmp_path / "archive").read_bytes() == b"three"


async def test_whoever_asks_after_the_server_has_gone_does_not_wait(tmp_path: Path) -> None:
    """A thread that was still at a store: the agent's end would wait for it for ever."""
    asked: list[str] = []
    receiver = Receiver(asked.append)
    receiver.close("the server has gone")

    with pytest.raises(MarserveError, match="the server has gone"):
        await asyncio.wait_for(receiver.receive(REF, tmp_path / "archive"), 5)

    assert asked == []
    assert not (tmp_path / "archive").exists()


async def test_whoever_waits_when_the_server_goes_waits_no_longer(tmp_path: Path) -> None:
    """With the reason."""
    receiver = Receiver(lambda sha256: None)
    task = await begin(receiver, tmp_path / "archive")
    receiver.close("the server has gone")

    with pytest.raises(MarserveError, match="the server has gone"):
        await task
