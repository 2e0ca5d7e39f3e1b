"""Looks at what gives no event: often at first, and the longer it has been waited for, the less."""

from __future__ import annotations

import pytest

from support import patience
from support.patience import pause_s


@pytest.mark.parametrize(("waited_s", "pause"), [(0, 0.002), (0.01, 0.002), (0.1, 0.01), (0.3, 0.03), (9, 0.05)])
def test_a_pause_is_a_tenth_of_what_has_been_waited(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, pause: float
) -> None:
    """Within its bounds, also at a clock that has been running for long."""
    monkeypatch.setattr(patience.time, "monotonic", lambda: 1000.0 + waited_s)

    assert pause_s(1000.0) == pytest.approx(pause)
