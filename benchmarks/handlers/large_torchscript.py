"""A handler around a TorchScript model of which little runs: its memory is what matters.

`python large_torchscript.py make FILE LAYERS` writes such a model, `python large_torchscript.py load FILE` loads one in
a plain interpreter, runs it once and says so: the model's own load, without a server around it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

WIDTH = 1024  # of a layer: 1024 x 1024 float32, 4 MiB
MODEL_FILE = "large.pt"


class LargeTorchScript:
    """Loads `large.pt` of the archive; each batch runs its first layer once, each row is answered with its sum."""

    def initialize(self, context: Any) -> None:
        """Load the model."""
        self.model = load(Path(context.system_properties["model_dir"], MODEL_FILE))

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[str]:
        """B rows in, B numbers out."""
        with torch.inference_mode():
            return [f"{value:.6f}" for value in self.model(torch.ones(len(rows), WIDTH)).sum(1).tolist()]


def load(path: Path) -> Any:
    """The model, ready to run."""
    return torch.jit.load(str(path), map_location="cpu").eval()


def make(path: Path, layers: int) -> None:
    """Write a model of `layers` layers of 4 MiB with random weights, of which `forward` uses the first alone."""

    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(layers))
            self.first = self.layers[0]

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows @ self.first

    torch.manual_seed(0)
    torch.jit.script(Large()).save(str(path))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        with torch.inference_mode():
            load(Path(sys.argv[2]))(torch.ones(1, WIDTH))
        print("ready", flush=True)
