"""The runtimes that models are run by: the only files of marserve that import torch and onnxruntime.

Nothing is imported here, so that a worker loads the one runtime that its model needs and no other.
"""

__all__: list[str] = []
