"""Descriptors with numbers as they have them in a server of many connections."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def more_descriptors(count: int = 2048) -> Iterator[None]:
    """Let this process have so many descriptors for a while; skips where the system does not allow it."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < count:
        pytest.skip(f"the system allows {most} descriptors, not {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, count), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
