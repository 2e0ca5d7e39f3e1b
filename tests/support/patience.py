"""How long tests wait for what will come."""

from __future__ import annotations

import time

# Long enough for a busy machine: only a test that fails waits so long.
PATIENCE_S = 30.0

# What gives no event is looked at again after a tenth of the time that it has been waited for, within these bounds.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.002, 0.05


def pause_s(since: float) -> float:
    """How long to pause, in seconds, before the next look at what has been waited for since this time of the monotonic
    clock. A look may take as long as a thousandth of a second, of this process or of a server.
    """
    return min(max((time.monotonic() - since) / 10, _LEAST_PAUSE_S), _MOST_PAUSE_S)
