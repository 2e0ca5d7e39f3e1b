"""What tests of pools may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.running_pool import TORCH_WORKERS, WORKERS, prepared_workers


@pytest.fixture(autouse=True)
def _quick_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers need not import: pools start hundreds of them. A test marked `true_starts` starts them as servers do."""
    if request.node.get_closest_marker("true_starts"):
        yield
        return
    with prepared_workers(TORCH_WORKERS if request.node.get_closest_marker("torch") else WORKERS):
        yield
