"""TorchServe's import names, for handlers written for it: every name here is defined in marserve_handlers."""

from marserve_handlers.version import __version__

__all__ = ["__version__"]
