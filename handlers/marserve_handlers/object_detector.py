"""The built-in handler `object_detector`: pictures in, what is where in them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from marserve_handlers.context import Context
from marserve_handlers.errors import PredictionException
from marserve_handlers.support.pictures import PictureTransform
from marserve_handlers.support.timing import timed
from marserve_handlers.vision import VisionHandler, picture_value, read_array


class ObjectDetector(VisionHandler):
    """Answers each picture with a list of `{label: [x1, y1, x2, y2], "score": s}` that score `threshold` or more.

    The model gives a dict with `boxes`, `labels` and `scores` for each picture, as torchvision's detectors do. Pictures
    keep their size and are scaled to 0..1; `handler` of the model's configuration may set `threshold`, and a transform
    as for `image_classifier`.
    """

    image_processing: Any = PictureTransform(resize=None, size=None, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    transform_defaults: ClassVar[Mapping[str, Any]] = {"resize": False, "size": False, "mean": 0.0, "std": 1.0}
    names_classes = True
    threshold: float = 0.5

    def initialize(self, context: Context) -> None:
        """Load the model, and take `threshold` from its configuration. Raises ValueError when that is no number."""
        super().initialize(context)
        section = self.model_yaml_config.get("handler")
        if isinstance(section, dict) and "threshold" in section:
            threshold = section["threshold"]
            if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
                raise ValueError(
                    f"handler.threshold of the model's configuration is {threshold!r}; it must be a number."
                )
            self.threshold = float(threshold)

    @timed
    def preprocess(self, data: list[Any]) -> Any:
        """B rows in; one tensor [B, C, H, W] out where the pictures are of one size, else a list of tensors [C, H, W].

        Raises BadPicture as `VisionHandler.preprocess` does.
        """
        transform = self.image_processing
        if not isinstance(transform, PictureTransform):
            return super().preprocess(data)
        pictures = [read_array(picture_value(row), transform) for row in data]
        has_one_size = all(picture.shape == pictures[0].shape for picture in pictures)
        if self.takes_arrays:
            if not has_one_size:
                # The server runs the batch's items alone then.
                raise ValueError("An ONNX detector takes one array: the pictures of a batch must be of one size.")
            return np.stack(pictures)
        from marserve_handlers.runtimes.tensors import as_tensor

        if has_one_size:
            return as_tensor(np.stack(pictures), self.device)
        return [as_tensor(picture, self.device) for picture in pictures]

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model: one dict a picture. A list of pictures is given to it as the list that it is."""
        if self.takes_arrays or not isinstance(data, list):
            output = super().inference(data, *args, **kwargs)
        else:
            from marserve_handlers.runtimes.tensors import run_on_list

            output = run_on_list(self.model, data, args, kwargs)
        # Scripted detectors of torchvision give (losses, detections).
        return output[1] if isinstance(output, tuple) and len(output) == 2 and not output[0] else output

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """One dict of `boxes`, `labels` and `scores` a picture in, one list of findings a picture out."""
        rows = [data] if isinstance(data, Mapping) else data
        return [self._findings(row) for row in rows]

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> Any:
        """Answers 501: a detector's output has no one score that could be attributed to pixels."""
        raise PredictionException("Object detectors give no explanations.", 501)

    def _findings(self, row: Any) -> list[dict[str, Any]]:
        if not isinstance(row, Mapping) or not row.keys() >= {"boxes", "labels", "scores"}:
            raise ValueError(
                "The model's output for a picture must be a dict with boxes [N, 4], labels [N] and scores [N], as "
                f"torchvision's detectors give it; it is {_shown(row)}."
            )
        names = self.mapping or {}
        found = zip(row["boxes"].tolist(), row["labels"].tolist(), row["scores"].tolist(), strict=True)
        return [
            {names.get(str(label), str(label)): box, "score": score}
            for box, label, score in found
            if score >= self.threshold
        ]


def _shown(row: Any) -> str:
    if isinstance(row, Mapping):
        return f"a dict with {', '.join(sorted(map(str, row)))[:200] or 'nothing'}"
    shape = getattr(row, "shape", None)
    return f"a {type(row).__name__}" + (f" of shape {list(shape)}" if shape is not None else "")
