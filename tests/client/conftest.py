"""What tests of the client share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.both_clients import Clients


@pytest.fixture(params=["sync", "async"])
def clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """Makes clients, of threads and of asyncio in turn."""
    made = Clients(request.param)
    yield made
    made.close()
