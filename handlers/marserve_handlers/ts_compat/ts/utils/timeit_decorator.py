"""TorchServe's name for `timeit`."""

from marserve_handlers.support.timing import timeit

__all__ = ["timeit"]
