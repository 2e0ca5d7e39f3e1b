"""marserve, a model server for PyTorch and ONNX. This module holds the version and imports nothing."""

__version__ = "0.1.0"
