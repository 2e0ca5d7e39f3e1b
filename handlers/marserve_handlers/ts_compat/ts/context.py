"""TorchServe's name for `marserve_handlers.context`."""

from marserve_handlers.context import Context, RequestProcessor

__all__ = ["Context", "RequestProcessor"]
