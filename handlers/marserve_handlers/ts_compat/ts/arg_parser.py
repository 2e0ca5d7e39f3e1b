"""TorchServe's name for the reader of its command line."""

from marserve_handlers.support.torchserve.internals import ArgParser

__all__ = ["ArgParser"]
