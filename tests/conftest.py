"""What every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.object_stores import S3Server, s3_server


@pytest.fixture
def anyio_backend() -> str:
    """Async tests run on asyncio alone: the server does too."""
    return "asyncio"


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """A stand-in for S3, one a test session; each test takes a bucket of its own."""
    with s3_server() as server:
        yield server
