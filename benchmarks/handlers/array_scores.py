"""Arrays (`.npy`) in, scores out: the model is `BaseHandler`'s, so that `marserve optimise` can build it anew."""

from __future__ import annotations

import io
from typing import Any

import numpy
import torch

from marserve_handlers.base import BaseHandler


class ArrayScores(BaseHandler):
    """One array a row, of the same shape; the best class and its score back."""

    names_classes = True

    def preprocess(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        """Bytes of a picture become floats from -1 to 1, in three channels; other arrays stay as they are."""
        stacked = torch.from_numpy(numpy.stack([numpy.load(io.BytesIO(row["body"])) for row in rows]))
        if stacked.dtype == torch.uint8:
            return stacked[:, None].float().sub_(127.5).div_(127.5).repeat(1, 3, 1, 1)
        return stacked

    def postprocess(self, scores: torch.Tensor) -> list[dict[str, float]]:
        """[B, classes] in, B answers out."""
        best, classes = scores.max(1)
        return [{"class": each, "score": score} for each, score in zip(classes.tolist(), best.tolist(), strict=True)]
