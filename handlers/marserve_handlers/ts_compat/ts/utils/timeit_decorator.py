"""TorchServe's name for `timeit`."""

from marserve_handlers.timing import timeit

__all__ = ["timeit"]
