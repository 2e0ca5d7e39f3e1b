"""The handwritten digits that ship with scikit-learn, as the pictures and numbers that the example uses.

1,797 scans of 8 by 8 pixels with 17 shades of grey. Every fifth one, beginning with the first, is held out: it is
never trained on, accuracy is measured on it, and the pictures beside the example are of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MEAN = 0.3053
STD = 0.3762
"""Mean and standard deviation of the training pictures, from 0 to 1; the model's configuration repeats them."""


def load_pictures() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """All pictures, uint8 [1797, 8, 8] from 0 to 255, and the digits they show, int64 [1797]."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64)


def is_held_out(count: int) -> NDArray[np.bool_]:
    """Which of `count` pictures, in scikit-learn's order, are held out: those of index 0, 5, 10 and so on."""
    return np.arange(count) % 5 == 0


def normalise(pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Pictures [B, 8, 8] as the network takes them, float32 [B, 1, 8, 8]; what the handler does with a PNG."""
    values = pictures[:, None].astype(np.float32) / np.float32(255)
    numbers: NDArray[np.float32] = (values - np.float32(MEAN)) / np.float32(STD)
    return numbers
