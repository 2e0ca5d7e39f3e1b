"""The built-in handler `image_classifier`: pictures in, the most likely labels out."""

from __future__ import annotations

from typing import Any

import numpy as np

from marserve_handlers.context import Context
from marserve_handlers.support.labels import map_class_to_label
from marserve_handlers.support.timing import timed
from marserve_handlers.vision import VisionHandler


class ImageClassifier(VisionHandler):
    """Answers each picture with a dict of label to probability, the `topk` most likely ones, best first.

    The model gives one score a class, [B, classes]; softmax makes probabilities of them. Without a configuration the
    picture is resized to 256, cut to 224 and normalised with ImageNet's figures; `handler` of the model's
    configuration may set `mode`, `resize`, `size`, `scale`, `mean`, `std` and `topk`.
    """

    names_classes = True
    topk = 5

    def initialize(self, context: Context) -> None:
        """Load the model, and take `topk` from its configuration. Raises ValueError when that is no number above 0."""
        super().initialize(context)
        section = self.model_yaml_config.get("handler")
        if isinstance(section, dict) and "topk" in section:
            self.set_max_result_classes(section["topk"])

    def set_max_result_classes(self, topk: int) -> None:
        """How many labels an answer has at most."""
        if type(topk) is not int or topk < 1:
            raise ValueError(
                f"handler.topk of the model's configuration is {topk!r}; it must be a whole number above 0."
            )
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """How many labels an answer has at most."""
        return self.topk

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Scores [B, classes] as a tensor or an array in, one dict a row out."""
        probabilities = softmax(as_scores(data))
        best = best_classes(probabilities, self.topk)
        chosen = np.take_along_axis(probabilities, best, axis=1)
        return list(map_class_to_label(chosen.tolist(), self.mapping, best.tolist()))


def as_scores(data: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The model's output as a float32 array [B, classes]; tensors come from wherever they lie."""
    if hasattr(data, "detach"):  # a torch tensor, without torch imported here
        data = data.detach().float().cpu().numpy()
    scores = np.asarray(data, dtype=np.float32)
    if scores.ndim != 2:
        raise ValueError(f"The model's output has the shape {scores.shape}; a classifier gives [rows, classes].")
    return scores


def softmax(scores: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Probabilities of scores [B, classes], each row summing up to 1."""
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities: np.ndarray[Any, np.dtype[np.float32]] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities


def best_classes(probabilities: np.ndarray[Any, np.dtype[np.float32]], topk: int) -> np.ndarray[Any, Any]:
    """The numbers of the `topk` (or all, if fewer) most likely classes of each row, best first, [B, k]."""
    classes = probabilities.shape[1]
    count = min(topk, classes)
    if count < classes and classes > 64:
        # Sorting a thousand classes to find five costs ten times as much.
        candidates = np.argpartition(-probabilities, count - 1, axis=1)[:, :count]
        order = np.argsort(-np.take_along_axis(probabilities, candidates, axis=1), axis=1, kind="stable")
        return np.take_along_axis(candidates, order, axis=1)
    return np.argsort(-probabilities, axis=1, kind="stable")[:, :count]
