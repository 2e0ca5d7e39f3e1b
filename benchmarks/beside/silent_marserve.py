"""marserve's command line with no metrics and no access log, for measuring what these two cost.

    python silent_marserve.py start --foreground ...

No setting does this, as no user should want it: histograms take no observations, and the access log says that nobody
reads it, so that its lines are not even made. Plain counters, an addition each, still count.
"""

from __future__ import annotations

from marserve.cli import main
from marserve.telemetry.logs.access_log import AccessLog
from marserve.telemetry.metrics.counts import Histogram


def _observe_nothing(histogram: Histogram, value: float, times: int = 1) -> None:
    pass


if __name__ == "__main__":
    AccessLog.is_on = property(lambda log: False)  # type: ignore[method-assign, assignment]  # the point of this file
    Histogram.observe = _observe_nothing  # type: ignore[method-assign, assignment]
    main()
