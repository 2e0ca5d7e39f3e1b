"""An eager model that is worth dividing, as an archive: an encoder with an embedding, attention and a head."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

BLOCKS = '''
import torch
from torch import nn


class Attention(nn.Module):
    """Attention over heads of 8; how many there are follows from what q gives, so that a part of them will do."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, t, -1, 8).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.down(torch.relu(self.up(x)))
'''

MODEL = """
import torch
from torch import nn

import blocks


class Encoder(nn.Module):
    def __init__(self, width=WIDTH, layers=LAYERS):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(blocks.Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 16)
        self.register_buffer("angles", torch.arange(width) / width, persistent=False)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        x = self.embed(x.long()) * torch.cos(self.angles) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))
"""

PLAN = """plan:
    embed: rowwise
    layers.*.attn.[qkv]: colwise
    layers.*.attn.o: rowwise
    layers.*.up: colwise
    layers.*.down: rowwise
    head: colwise_rep
"""


def parallel(ranks: int, plan: str = PLAN) -> str:
    """The lines of a configuration that divide the model over so many ranks."""
    return f"parallel:\n  mesh: {{tp: {ranks}}}\n  {plan}"


def source(*, width: int = 32, layers: int = 2) -> str:
    """The model's file."""
    return MODEL.replace("WIDTH", str(width)).replace("LAYERS", str(layers))


def build(text: str) -> Any:
    """The model of that source, with numbers of its own."""
    blocks = ModuleType("blocks")
    exec(BLOCKS, vars(blocks))
    names: dict[str, Any] = {"blocks": blocks}
    exec(text.replace("import blocks", ""), names)
    return names["Encoder"]()


def divided_state(*, width: int = 32, layers: int = 2) -> dict[str, Any]:
    """The weights of the archive, which are always the same."""
    import torch

    torch.manual_seed(5)
    state: dict[str, Any] = build(source(width=width, layers=layers)).state_dict()
    state["scale"] = torch.linspace(0.5, 1.5, width)
    return state


def bytes_of_a_rank(modules: Iterable[Any], division: Any) -> int:
    """The bytes of the parameters that each rank of a division holds, by the modules of its plan."""
    from marserve_handlers.sharding.plan import divided_dim

    total = 0
    for module in modules:
        style = division.styles.get(module.name, "replicate")
        for name, shape in module.shapes.items():
            is_divided = divided_dim(module.kind, style, name) is not None
            total += prod(shape) * module.bytes_each // (division.ranks if is_divided else 1)
    return total


def make_divided(
    path: Path,
    config: str,
    *,
    safetensors: bool = False,
    width: int = 32,
    layers: int = 2,
    blocks: str = BLOCKS,
    has_weights: bool = True,
    handler: str = "",
) -> Path:
    """The archive at `path`; `blocks` is the file of its layers. Without weights the configuration says where.

    `handler` is the source of one that takes the place of `base_handler`.
    """
    import torch

    text, state = source(width=width, layers=layers), divided_state(width=width, layers=layers)
    if safetensors:
        from safetensors.torch import save

        weights, file = save(state), "model.safetensors"
    else:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        weights, file = buffer.getvalue(), "model.pt"
    entry = {
        "modelName": path.stem,
        "modelVersion": "1.0",
        "handler": "own.py:Handler" if handler else "base_handler",
        "modelFile": "model.py",
        "serializedFile": file,
        "configFile": "model-config.yaml",
    }
    if not has_weights:
        del entry["serializedFile"]
    manifest = {"createdOn": "01/02/2026 03:04:05", "runtime": "python", "model": entry, "archiverVersion": "0.12.0"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("model.py", text)
        archive.writestr("blocks.py", blocks)
        archive.writestr("own.py", handler)
        archive.writestr("model-config.yaml", config)
        if has_weights:
            archive.writestr(file, weights)
    return path
