"""What tests of pools may use."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from support.running_pool import TORCH_WORKERS, WORKERS, prepared_workers


@pytest.fixture(autouse=True)
def _quick_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers need not import: pools start hundreds of them. A test marked `true_starts` starts them as servers do.

    A test of a pure core runs no event loop, starts no worker, and does not wait for the process that would fork one.
    """
    if request.node.get_closest_marker("true_starts") or not inspect.iscoroutinefunction(request.function):
        yield
        return
    with prepared_workers(TORCH_WORKERS if request.node.get_closest_marker("torch") else WORKERS):
        yield
