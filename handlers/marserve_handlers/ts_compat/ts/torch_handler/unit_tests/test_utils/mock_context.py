"""TorchServe's name for `marserve_handlers.mock_context`."""

from marserve_handlers.mock_context import MockContext

__all__ = ["MockContext"]
