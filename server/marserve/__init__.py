"""marserve, a model server for PyTorch and ONNX. This module holds the version and imports nothing."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in ("BadInput", "Event", "PredictionException", "Tensor", "model"):
        # No AttributeError, in whose place `from marserve import model` raises an error of its own words.
        raise ImportError(f"{name} is in marserve_handlers: from marserve_handlers import {name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
