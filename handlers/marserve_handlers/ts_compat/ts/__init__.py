"""TorchServe's import names, for handlers written for it: every name here is defined in marserve_handlers."""

from marserve_handlers.support.torchserve.beside_torchserve import refuse_beside_torchserve
from marserve_handlers.support.torchserve.version import __version__

refuse_beside_torchserve(__path__)

__all__ = ["__version__"]
