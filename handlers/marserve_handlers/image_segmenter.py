"""The built-in handler `image_segmenter`: pictures in, the class of every pixel out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from marserve_handlers.support.timing import timed
from marserve_handlers.vision import VisionHandler


class ImageSegmenter(VisionHandler):
    """Answers each picture with nested lists [H][W][2]: the likeliest class of a pixel as a float, and its probability.

    The model gives scores [B, classes, H, W], alone or under `out` of a dict as torchvision's models do. The picture is
    prepared as for `image_classifier`, and `handler` of the model's configuration may set the same keys.
    """

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Scores [B, classes, H, W] in, B lists [H][W][2] out."""
        scores = _as_maps(data)
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        best = scores.argmax(axis=1)
        # The largest exponential is 1: it was subtracted from itself.
        probabilities = 1 / exponentials.sum(axis=1)
        answers: list[Any] = np.stack([best.astype(np.float32), probabilities], axis=3).tolist()
        return answers


def _as_maps(data: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    if isinstance(data, Mapping):
        data = data["out"]
    if hasattr(data, "detach"):  # a torch tensor, without torch imported here
        data = data.detach().float().cpu().numpy()
    scores = np.asarray(data, dtype=np.float32)
    if scores.ndim != 4:
        raise ValueError(f"The model's output has the shape {scores.shape}; a segmenter gives [rows, classes, H, W].")
    return scores
