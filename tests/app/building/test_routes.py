"""Which key a listener asks for where a route does not say."""

from __future__ import annotations

import pytest

from marserve.app.building.routes import own_access


@pytest.mark.parametrize(
    ("names", "access"),
    [
        (["Inference"], "inference"),
        (["Management"], "management"),
        (["Management", "Metrics"], "management"),
        (["Inference", "Management"], "either"),
        (["Inference", "Management", "Metrics"], "either"),
        (["Inference", "Metrics"], "inference"),
    ],
)
def test_a_listener_asks_for_the_key_of_its_apis(names: list[str], access: str) -> None:
    """One with both takes either; metrics need none, and so do not count."""
    assert own_access(names) == access
