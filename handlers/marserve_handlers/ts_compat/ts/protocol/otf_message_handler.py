"""TorchServe's name for the older place of streaming."""

from marserve_handlers.context import send_intermediate_predict_response

__all__ = ["send_intermediate_predict_response"]
