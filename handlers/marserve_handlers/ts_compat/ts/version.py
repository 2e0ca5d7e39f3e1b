"""TorchServe's name for the version."""

from marserve_handlers.version import __version__

__all__ = ["__version__"]
