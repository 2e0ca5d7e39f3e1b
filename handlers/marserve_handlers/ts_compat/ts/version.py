"""TorchServe's name for the version."""

from marserve_handlers.support.torchserve.version import __version__, version_path

__all__ = ["__version__", "version_path"]
