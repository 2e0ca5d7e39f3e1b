"""TorchServe's name for streaming, and importing by name."""

from marserve_handlers.classes import import_class
from marserve_handlers.context import Context, send_intermediate_predict_response

__all__ = ["Context", "import_class", "send_intermediate_predict_response"]
