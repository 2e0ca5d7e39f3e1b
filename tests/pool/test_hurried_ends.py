"""The end of a pool whose workers still run something, when a second signal hurries it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from marserve.pool.slots.life import STOP_GRACE_S
from support.processes import until
from support.running_pool import RunningPool

SLOW = """
import time

def handle(rows, context):
    if rows is None:
        return None
    open("begun", "w").close()
    time.sleep(60)
"""


@pytest.mark.anyio
@pytest.mark.parametrize("comes_later", [False, True])
async def test_a_hurried_end_waits_for_no_handler(tmp_path: Path, comes_later: bool) -> None:
    """Neither from its begin on, nor when the hurry comes while it waits already."""
    async with RunningPool(tmp_path, SLOW) as running:
        await running.start()
        running.send(b"x")
        await until(running.file("begun").exists, "the handler runs")
        running.look()
        began = time.monotonic()
        asyncio.get_running_loop().call_later(0.1 if comes_later else 0.0, running.launchers.hurry.set)
        await running.pool.stop()
        took_s = time.monotonic() - began

    assert took_s < STOP_GRACE_S
