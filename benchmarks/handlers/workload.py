"""Real work for a model server: three small networks with random weights, each with the body it is asked with.

    cnn      a small convolutional network on a PNG of 28 x 28 pixels
    resnet   a network of ResNet-18's shape on a JPEG of 224 x 224 pixels, of some 100 KB
    encoder  four transformer layers on 64 token ids in JSON
    echo     no network: each body back

`open_work(name, folder)` gives what answers a list of bodies, the same in every server and in a plain loop, with one
torch thread. In an archive the handler finds its name under `work` of the model's configuration.
`python workload.py make FOLDER` writes the models and the bodies: nothing is downloaded.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Work = Callable[[Sequence[Any]], list[Any]]

BODIES = {
    "cnn": ("cnn.png", "image/png"),
    "resnet": ("resnet.jpg", "image/jpeg"),
    "encoder": ("encoder.json", "application/json"),
}
SEED = 5
TOKENS, VOCABULARY, WIDTH, HEADS, LAYERS, CLASSES = 64, 8192, 256, 4, 4, 8
BEST = 5


class Workload:
    """The handler: one answer a row."""

    def initialize(self, context: Any) -> None:
        """Load the work that the configuration names."""
        self.work = open_work(context.model_yaml_config["work"], Path(context.system_properties["model_dir"]))

    def handle(self, rows: list[dict[str, Any]], context: Any) -> list[Any]:
        """B rows in, B answers out."""
        return self.work([row["body"] for row in rows])


def open_work(name: str, folder: Path) -> Work:
    """What answers bodies: bytes, or what JSON bodies were decoded to. Has run already, so that torch has settled."""
    if name == "echo":
        return lambda bodies: [bytes(body) for body in bodies]
    import torch

    torch.set_num_threads(1)
    network = torch.jit.load(str(folder / f"{name}.pt")).eval()
    work = _texts(network) if name == "encoder" else _pictures(network, "L" if name == "cnn" else "RGB")
    body = (folder / BODIES[name][0]).read_bytes()
    for count in (1, 1, 2, 2, 16, 16):
        work([body] * count)
    return work


def _pictures(network: Any, mode: str) -> Work:
    import numpy
    import torch
    from PIL import Image

    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))

    def read(body: bytes) -> Any:
        pixels = torch.from_numpy(numpy.array(Image.open(io.BytesIO(body)).convert(mode)))
        if mode == "L":
            return pixels.unsqueeze(0).float().div_(255)
        return pixels.permute(2, 0, 1).float().div_(255).sub_(mean).div_(deviation)

    def work(bodies: Sequence[Any]) -> list[Any]:
        with torch.inference_mode():
            scores, classes = network(torch.stack([read(body) for body in bodies])).softmax(1).topk(BEST, 1)
        return [{"classes": best, "scores": of} for best, of in zip(classes.tolist(), scores.tolist(), strict=True)]

    return work


def _texts(network: Any) -> Work:
    import torch

    def work(bodies: Sequence[Any]) -> list[Any]:
        texts = [(body if isinstance(body, dict) else json.loads(bytes(body)))["ids"] for body in bodies]
        longest = max(map(len, texts))
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        is_there = torch.zeros(len(texts), longest, dtype=torch.bool)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            is_there[row, : len(text)] = True
        with torch.inference_mode():
            return [{"scores": scores} for scores in network(ids, is_there).softmax(1).tolist()]

    return work


def make(folder: Path) -> None:
    """Write each model as TorchScript and each body into `folder`."""
    import numpy
    import torch
    from optimised_nets import resnet_body
    from PIL import Image
    from torch import nn

    class Layer(nn.Module):
        """Attention, then a network of two layers, each added to what went in."""

        def __init__(self) -> None:
            super().__init__()
            self.heads = HEADS
            self.project, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rows, tokens, width = x.shape
            parts = self.project(x).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask)
            x = self.first(x + self.join(seen.transpose(1, 2).reshape(rows, tokens, width)))
            x = self.second(x + self.wide(x))
            return x  # noqa: RET504  # TorchScript has no cast, and mypy takes what a module returns for anything

    class Encoder(nn.Module):
        """Token ids to scores of classes."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * TOKENS, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
            self.score = nn.Linear(WIDTH, CLASSES)

        def forward(self, ids: torch.Tensor, is_there: torch.Tensor) -> torch.Tensor:
            x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
            for layer in self.layers:
                x = layer(x, is_there[:, None, None, :])
            x = self.score(x[:, 0])
            return x  # noqa: RET504

    torch.manual_seed(SEED)
    cnn = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 12 * 12, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    resnet = nn.Sequential(*resnet_body(), nn.Linear(512, 1000))
    with torch.no_grad():
        for _ in range(2):  # so that the norms have seen data and later layers get numbers of a sane size
            resnet.train()(torch.randn(8, 3, 224, 224))
        for name, network, example in (("cnn", cnn, (1, 28, 28)), ("resnet", resnet, (3, 224, 224))):
            torch.jit.trace(network.eval(), torch.rand(2, *example)).save(str(folder / f"{name}.pt"))
        torch.jit.script(Encoder().eval()).save(str(folder / "encoder.pt"))

    random = numpy.random.default_rng(SEED)
    down, right = numpy.mgrid[0:224, 0:224] / 224
    waves = numpy.stack([numpy.sin((6 + c) * down + c) * numpy.cos(5 * right * (c + 1)) for c in range(3)], -1)
    picture = numpy.clip(128 + 90 * waves + random.normal(0, 20, waves.shape), 0, 255).astype("uint8")
    Image.fromarray(picture).save(folder / BODIES["resnet"][0], quality=97, subsampling=0)
    Image.fromarray(picture[:28, :28, 0]).save(folder / BODIES["cnn"][0])
    ids = random.integers(0, VOCABULARY, TOKENS).tolist()
    (folder / BODIES["encoder"][0]).write_text(json.dumps({"ids": ids}))


if __name__ == "__main__":
    make(Path(sys.argv[2]))
