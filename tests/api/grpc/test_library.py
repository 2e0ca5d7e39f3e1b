"""Tests for the import of grpcio: its fork handlers stay out of the server, and the environment as it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, asyncio, time
from marserve.api.grpc import library as grpc_library
from grpc import aio

async def main():
    server = aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    before = set(os.listdir("/proc/self/task"))
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    after = set(os.listdir("/proc/self/task"))
    await server.stop(None)
    print(len(before - after), os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "unset"))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are read from /proc")
@pytest.mark.parametrize("own", ["unset", "true"])
def test_a_fork_stops_none_of_grpcios_threads(own: str) -> None:
    """A thread that cannot be started again ends the process by SIGABRT. Workers inherit the user's own value."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    if own != "unset":
        environment["GRPC_ENABLE_FORK_SUPPORT"] = own

    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
    )

    assert ended.stdout.split() == ["0", own]
