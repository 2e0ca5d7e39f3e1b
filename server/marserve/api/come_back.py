"""When a refused client is told to come back: not before the moment that is known, and not all in the same second.

Clients that are refused together and told one time come together again, and most of them are refused once more. Each
is told a time of its own: the dispatcher deals out the time in which its queue drains (`Dispatcher.appoint_s`); where
nothing is known of that, it is up to half as long again at random. `dice` is for tests.
"""

from __future__ import annotations

import math
import random

# Even where trying again may pay in a second, clients spread over so many more.
LEAST_SPREAD_S = 2
MOST_SPREAD_S = 60


def come_back_in(earliest_s: float, dice: random.Random | None = None, *, spread_s: int | None = None) -> int:
    """Whole seconds for `Retry-After`: `earliest_s` rounded up, at least 1, and at random up to `spread_s` more.

    Without it up to half as much, `LEAST_SPREAD_S` at least and `MOST_SPREAD_S` at most.
    """
    earliest = max(1, math.ceil(earliest_s))
    spread = min(MOST_SPREAD_S, max(LEAST_SPREAD_S, earliest // 2)) if spread_s is None else spread_s
    return earliest + (random.randint(0, spread) if dice is None else dice.randint(0, spread))
