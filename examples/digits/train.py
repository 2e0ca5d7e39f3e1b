"""Trains the digits network, reports how good it is, and builds its four archives.

    python examples/digits/train.py [--out FOLDER] [--store FOLDER] [--pictures FOLDER]

Needs the extras torch, export and examples; takes some ten seconds on one core. The same seed on the same torch gives
the same weights.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from archives import build_archives
from digits_data import is_held_out, load_pictures, normalise
from digits_net import DigitsNet
from PIL import Image

HERE = Path(__file__).resolve().parent
EPOCHS = 30
WANTED_ACCURACY = 0.97


def train(epochs: int = EPOCHS, seed: int = 0) -> DigitsNet:
    """The network, trained on all pictures that are not held out, each moved by up to one pixel at random."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # sums in another order give other weights
    pictures, digits = load_pictures()
    is_training = ~is_held_out(len(pictures))
    inputs = torch.from_numpy(normalise(pictures[is_training]))
    targets = torch.from_numpy(digits[is_training])
    net = DigitsNet()
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    background = inputs.min()
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs)).split(64):
            padded = torch.nn.functional.pad(inputs[chosen], (1, 1, 1, 1), value=float(background))
            down, right = torch.randint(0, 3, (2,)).tolist()
            loss = torch.nn.functional.cross_entropy(
                net(padded[:, :, down : down + 8, right : right + 8]), targets[chosen], label_smoothing=0.02
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        schedule.step()
    return net.eval()


def measure_accuracy(net: torch.nn.Module) -> float:
    """The share of held-out pictures that the network reads right."""
    pictures, digits = load_pictures()
    held_out = is_held_out(len(pictures))
    with torch.inference_mode():
        guesses = net(torch.from_numpy(normalise(pictures[held_out]))).argmax(1).numpy()
    return float(np.mean(guesses == digits[held_out]))


def save_pictures(folder: Path) -> list[Path]:
    """Write the first held-out picture of each digit as `{digit}.png`, grey, 8 by 8 pixels."""
    pictures, digits = load_pictures()
    held_out = np.flatnonzero(is_held_out(len(pictures)))
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for digit in range(10):
        index = next(index for index in held_out if digits[index] == digit)
        path = folder / f"{digit}.png"
        Image.fromarray(pictures[index]).save(path, optimize=True)
        paths.append(path)
    return paths


def main() -> int:
    """Train, measure, and write the archives and the pictures; status 1 when the network is not good enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "build", help="where the archives go (default: build)")
    parser.add_argument("--store", type=Path, help="a model store that gets digits.mar, too (default: none)")
    parser.add_argument("--pictures", type=Path, help="where the pictures of held-out digits go (default: nowhere)")
    arguments = parser.parse_args()
    began = time.monotonic()
    net = train()
    accuracy = measure_accuracy(net)
    print(f"held-out accuracy {accuracy:.2%} after {time.monotonic() - began:.0f} s")
    if accuracy < WANTED_ACCURACY:
        print(f"that is less than {WANTED_ACCURACY:.0%}; nothing is written")
        return 1
    archives = build_archives(net.state_dict(), arguments.out)
    for path in archives:
        print(f"{path.name:24} {path.stat().st_size:8,} bytes")
    if arguments.store is not None:
        arguments.store.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(archives[0], arguments.store / archives[0].name)
    if arguments.pictures is not None:
        save_pictures(arguments.pictures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
