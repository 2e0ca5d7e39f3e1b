"""Which dispatcher a version gets: the plain one, unless its configuration asks for more than single batches. Pure."""

from __future__ import annotations

from marserve.pool.concurrent import ConcurrentDispatcher
from marserve.pool.dispatcher import Actions, Dispatcher
from marserve.pool.options import PoolOptions
from marserve.pool.stateful import StatefulDispatcher
from marserve.telemetry.metrics import VersionMetrics


def make_dispatcher(options: PoolOptions, metrics: VersionMetrics, actions: Actions) -> Dispatcher:
    """The dispatcher that these options ask for."""
    if options.is_concurrent:
        return ConcurrentDispatcher(options, metrics, actions)
    if options.sequences is not None or options.continuous_batching:
        return StatefulDispatcher(options, metrics, actions)
    return Dispatcher(options, metrics, actions)
