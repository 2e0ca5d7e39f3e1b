"""The dispatchers of versions that ask for more than single batches; `make_dispatcher` chooses.

direct               what they have in common
steps_and_sequences  workers that keep something between calls: sequences, continuous batching
coroutines           workers that run many requests at once
"""

from __future__ import annotations

from marserve.pool.dispatch.actions import Actions
from marserve.pool.dispatch.dispatcher import Dispatcher
from marserve.pool.dispatch.modes.coroutines import ConcurrentDispatcher
from marserve.pool.dispatch.modes.steps_and_sequences import StatefulDispatcher
from marserve.pool.options import PoolOptions
from marserve.telemetry.metrics.counts import VersionMetrics


def make_dispatcher(options: PoolOptions, metrics: VersionMetrics, actions: Actions) -> Dispatcher:
    """The dispatcher that these options ask for."""
    if options.is_concurrent:
        return ConcurrentDispatcher(options, metrics, actions)
    if options.sequences is not None or options.continuous_batching:
        return StatefulDispatcher(options, metrics, actions)
    return Dispatcher(options, metrics, actions)
