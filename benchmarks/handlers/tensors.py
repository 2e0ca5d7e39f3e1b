"""A model that declares one tensor of any length, and gives it back: what is left is the server's work."""

from __future__ import annotations

from typing import Any

from marserve_handlers import Tensor, model


@model(inputs={"x": Tensor("float32", ["batch", "n"])}, outputs={"y": Tensor("float32", ["batch", "n"])})
class Tensors:
    """One tensor in, the same one out."""

    def predict(self, x: Any) -> Any:
        """Nothing to compute."""
        return {"y": x}
