"""The `Retry-After` of a refusal: not before the server may have room, and spread over several seconds.

Clients that are refused together and get the same time come back together, and most of them are refused again. So each
gets a time of its own: the dispatcher deals out the time in which its queue drains (`Dispatcher.appoint_s`). Where that
time is not known, up to half of the earliest time is added at random. `dice` is for tests.
"""

from __future__ import annotations

import math
import random

# The bounds of the random part, in seconds.
LEAST_SPREAD_S = 2
MOST_SPREAD_S = 60


def come_back_in(earliest_s: float, dice: random.Random | None = None, *, spread_s: int | None = None) -> int:
    """Whole seconds for `Retry-After`: `earliest_s` rounded up, at least 1, plus up to `spread_s` at random.

    Without `spread_s`: half of the earliest time, within `LEAST_SPREAD_S` and `MOST_SPREAD_S`.
    """
    earliest = max(1, math.ceil(earliest_s))
    spread = min(MOST_SPREAD_S, max(LEAST_SPREAD_S, earliest // 2)) if spread_s is None else spread_s
    return earliest + (random.randint(0, spread) if dice is None else dice.randint(0, spread))
