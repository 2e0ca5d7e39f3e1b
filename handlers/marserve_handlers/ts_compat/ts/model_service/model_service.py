"""TorchServe's name for `marserve_handlers.support.torchserve.model_service`."""

from marserve_handlers.support.torchserve.model_service import ModelService, SingleNodeService

__all__ = ["ModelService", "SingleNodeService"]
