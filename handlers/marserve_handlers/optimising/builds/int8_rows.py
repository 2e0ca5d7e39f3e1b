"""Weights in INT8, and activations with a scale for each row, so that mates change nothing; compiled by torch.compile.

Not compiled it was seen to be five times slower than its parent.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from marserve_handlers.optimising.builds import CannotBuild, Parent, compiled
from marserve_handlers.optimising.builds.aot_int8 import import_torchao
from marserve_handlers.optimising.material import Material


def build(material: Material, folder: Path) -> None:
    """As torch.compile alone: weights are rounded at the load."""
    import_torchao("quantization")
    import torch  # here: a session's process need not have it

    if material.is_session or not any(isinstance(each, torch.nn.Linear) for each in material.model.modules()):
        raise CannotBuild("it has no linear layers")
    compiled.build(material, folder)


def load(parent: Parent, folder: Path, threads: int) -> Any:
    """The parent, quantised and compiled."""
    library = import_torchao("quantization")
    model = copy.deepcopy(parent())  # which may be the one that others are compared with
    library.quantize_(model, library.Int8DynamicActivationInt8WeightConfig())
    return compiled.compile_whole(model, folder)
