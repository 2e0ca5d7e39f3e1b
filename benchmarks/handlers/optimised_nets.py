"""The networks that `optimised.py` builds anew, and the inputs they are asked with. Nothing is downloaded.

    resnet   ResNet-18 on scikit-learn's digits, scaled to 224 x 224
    encoder  four transformer layers of width 512 on 64 token ids, of which one of eight groups is the most frequent
    mlp      three wide layers on the digits, scaled to 28 x 28

They are trained here, shortly: with random weights the scores hang on the last bits, and even bfloat16 is half of the
mean output off, which says nothing of networks that people serve.

`python optimised_nets.py NAME FOLDER COUNT` writes `weights.safetensors`, and COUNT held-out inputs to `inputs/`, and
prints the share of these that it gets right.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

SEED = 5
TOKENS, VOCABULARY, WIDTH, HEADS, LAYERS, GROUPS = 64, 8192, 512, 8, 4, 8
SIDE, SMALL_SIDE, DIGITS = 224, 28, 10
# Inputs to learn from, steps, the batch of each, and the rate.
TRAINING = {"resnet": (480, 60, 16, 1e-3), "encoder": (1600, 100, 16, 1e-4), "mlp": (1200, 300, 64, 1e-3)}
NAMES = ("resnet", "encoder", "mlp")
_STAGES = (
    (64, 64, 1),
    (64, 64, 1),
    (64, 128, 2),
    (128, 128, 1),
    (128, 256, 2),
    (256, 256, 1),
    (256, 512, 2),
    (512, 512, 1),
)


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.cut: nn.Module = nn.Identity()
        if stride > 1 or into != out:
            self.cut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, into, h, w] in, [B, out, h / stride, w / stride] out."""
        return torch.relu(self.way(x) + self.cut(x))


def resnet_body() -> nn.Sequential:
    """ResNet-18 up to its last layer: pictures [B, 3, 224, 224] in, [B, 512] out."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        *(Residual(*stage) for stage in _STAGES), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class ResNet(nn.Module):
    """ResNet-18: pictures [B, 3, 224, 224] in, [B, 10] out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = resnet_body()
        self.scores = nn.Linear(512, DIGITS)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """The scores."""
        scores: torch.Tensor = self.scores(self.body(pictures))
        return scores


class Encoder(nn.Module):
    """Token ids [B, 64] in, scores of the groups [B, 8] out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) / 10)
        with torch.no_grad():  # words of a group are alike, as after a long training: this one sees few of them
            self.words.weight += torch.randn(GROUPS, WIDTH).repeat_interleave(VOCABULARY // GROUPS, 0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, GROUPS)

    def body(self, ids: torch.Tensor) -> torch.Tensor:
        """What the last layer is given: [B, 512]."""
        features: torch.Tensor = self.layers(self.words(ids) + self.places).mean(1)
        return features

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The scores."""
        scores: torch.Tensor = self.scores(self.body(ids))
        return scores


class Mlp(nn.Module):
    """Pictures [B, 784] in, [B, 10] out."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (SMALL_SIDE**2, 1024, 1024, 1024)
        layers = [part for into, out in pairwise(sizes) for part in (nn.Linear(into, out), nn.ReLU())]
        self.body = nn.Sequential(*layers)
        self.scores = nn.Linear(1024, DIGITS)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """The scores."""
        scores: torch.Tensor = self.scores(self.body(pictures))
        return scores


NETS: dict[str, type[nn.Module]] = {"resnet": ResNet, "encoder": Encoder, "mlp": Mlp}


def make(name: str, folder: Path, count: int) -> None:
    """Write the weights, and so many inputs that nothing was fitted to."""
    from safetensors.torch import save_model

    torch.manual_seed(SEED)
    net: Any = NETS[name]()
    known, steps, size, rate = TRAINING[name]
    arrays, numbers = _texts(known + count) if name == "encoder" else _digits(known + count, name)
    inputs, classes = torch.from_numpy(arrays), torch.from_numpy(numbers)
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    for _ in range(steps):
        chosen = torch.randint(0, known, (size,))
        loss = nn.functional.cross_entropy(net(_as_model_takes(inputs[chosen])), classes[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    net.eval()
    with torch.inference_mode():
        right = [net(_as_model_takes(part)).argmax(1) for part in inputs[known:].split(16)]
    print(f"{(torch.cat(right) == classes[known:]).float().mean():.3f}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inputs").mkdir()
    for at, array in enumerate(arrays[known:]):
        numpy.save(folder / "inputs" / f"{at:04}.npy", array)
    save_model(net, str(folder / "weights.safetensors"))


def _as_model_takes(part: torch.Tensor) -> torch.Tensor:
    return part[:, None].float().sub_(127.5).div_(127.5).repeat(1, 3, 1, 1) if part.dtype == torch.uint8 else part


def _digits(count: int, name: str) -> tuple[Any, Any]:
    from PIL import Image
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    chosen = numpy.random.default_rng(SEED).permutation(len(data.images))[:count]
    side = SIDE if name == "resnet" else SMALL_SIDE
    pictures = [Image.fromarray((data.images[at] * 15.9375).astype("uint8")).resize((side, side)) for at in chosen]
    pixels = numpy.stack([numpy.asarray(picture) for picture in pictures])
    if name == "mlp":
        pixels = (pixels.reshape(count, -1) / numpy.float32(255) - numpy.float32(0.3)).astype("float32")
    return pixels, data.target[chosen]


def _texts(count: int) -> tuple[Any, Any]:
    dice = numpy.random.default_rng(SEED)
    classes = dice.integers(0, GROUPS, count)
    ids = dice.integers(0, VOCABULARY, (count, TOKENS))
    favoured = dice.random((count, TOKENS)) < 0.8
    size = VOCABULARY // GROUPS
    ids[favoured] = (classes[:, None] * size + ids % size)[favoured]
    return ids, classes


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
