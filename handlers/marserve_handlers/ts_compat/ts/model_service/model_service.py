"""TorchServe's name for `marserve_handlers.model_service`."""

from marserve_handlers.model_service import ModelService, SingleNodeService

__all__ = ["ModelService", "SingleNodeService"]
