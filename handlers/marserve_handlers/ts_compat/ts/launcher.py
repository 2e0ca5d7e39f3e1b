"""TorchServe's name for `marserve_handlers.support.torchserve.launcher`."""

from marserve_handlers.support.torchserve.launcher import (
    PrintTillTheEnd,
    Tee,
    register_model,
    register_model_with_params,
    start,
    stop,
)

__all__ = ["PrintTillTheEnd", "Tee", "register_model", "register_model_with_params", "start", "stop"]
