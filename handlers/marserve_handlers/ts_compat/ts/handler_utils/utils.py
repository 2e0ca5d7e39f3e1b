"""TorchServe's name for streaming, and importing by name."""

from marserve_handlers.context import Context, send_intermediate_predict_response
from marserve_handlers.support.classes import import_class
from marserve_handlers.support.torchserve.internals import create_predict_response

__all__ = ["Context", "create_predict_response", "import_class", "send_intermediate_predict_response"]
