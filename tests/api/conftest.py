"""What tests of surfaces may use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

# grpcio tells a loop of its last events a little after channel and server are closed.
LAST_EVENTS_S = 0.2


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Async tests run on asyncio alone: the server does too."""
    return "asyncio"


@pytest.fixture(scope="module")
async def one_grpc_loop(anyio_backend: str) -> AsyncIterator[None]:
    """One event loop for all tests of a module that use grpcio.

    grpcio has one poller a process, and stumbles over events of a loop that was closed before they came. A server has
    one loop as long as it lives.
    """
    yield
    await asyncio.sleep(LAST_EVENTS_S)
