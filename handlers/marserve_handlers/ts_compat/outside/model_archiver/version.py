"""The archiver's name for its version."""

from marserve import __version__

__all__ = ["__version__"]
