"""marserve's command line with no metrics, no access log or neither, for measuring what these cost.

    python silent_marserve.py [log] [metrics] start --foreground ...

No setting does this, as no user should want it: histograms take no observations, and the access log says that nobody
reads it, so that its lines are not even made. Plain counters, an addition each, still count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from marserve.cli import main
from marserve.telemetry.logs.access_log import AccessLog
from marserve.telemetry.metrics.counts import Histogram


def _observe_nothing(histogram: Histogram, value: float, times: int = 1) -> None:
    pass


def _observe_none(histogram: Histogram, values: Sequence[float]) -> None:
    pass


def _silence(what: str) -> None:
    if what == "log":
        AccessLog.is_on = property(lambda log: False)  # type: ignore[method-assign, assignment]  # the point of this file
    else:
        Histogram.observe = _observe_nothing  # type: ignore[method-assign, assignment]
        Histogram.observe_all = _observe_none  # type: ignore[method-assign]


if __name__ == "__main__":
    while sys.argv[1] in ("log", "metrics"):
        _silence(sys.argv.pop(1))
    main()
