"""TorchServe's name for what handlers took from its service."""

from marserve_handlers.errors import PredictionException
from marserve_handlers.metrics_store import PREDICTION_METRIC, emit_metrics
from marserve_handlers.torchserve_internals import Service

__all__ = ["PREDICTION_METRIC", "PredictionException", "Service", "emit_metrics"]
