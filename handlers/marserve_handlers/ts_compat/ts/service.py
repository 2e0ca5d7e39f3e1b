"""TorchServe's name for what handlers took from its service."""

from marserve_handlers.errors import PredictionException
from marserve_handlers.support.torchserve.internals import Service
from marserve_handlers.support.torchserve.metrics_store import PREDICTION_METRIC, emit_metrics

__all__ = ["PREDICTION_METRIC", "PredictionException", "Service", "emit_metrics"]
