"""`VisionHandler`: what handlers of pictures share, from a batch of rows to one tensor or array."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from marserve_handlers.base import BaseHandler, value_of
from marserve_handlers.context import Context
from marserve_handlers.errors import BadPicture, PredictionException
from marserve_handlers.support.pictures import FloatArray, PictureTransform, open_picture
from marserve_handlers.support.targets import read_target
from marserve_handlers.support.timing import timed

_TRANSFORM_KEYS = ("mode", "resize", "size", "scale", "mean", "std")


class VisionHandler(BaseHandler):
    """A handler whose rows are pictures: bytes of an image file, base64 text of them, or nested lists of numbers.

    `image_processing` turns one Pillow image into what the model takes. Subclasses may set it to any callable, for
    example torchvision's transforms; where it is ours, `handler` of the model's configuration sets it up.
    """

    image_processing: Any = PictureTransform()
    transform_defaults: ClassVar[Mapping[str, Any]] = {}
    """What `handler` of the configuration is taken to say of the transform where it says nothing."""

    def initialize(self, context: Context) -> None:
        """Load the model and read `handler` of its configuration.

        Without `limit_max_image_pixels` pictures of any size are opened. Raises ValueError for a setting of the
        transform that cannot be used.
        """
        super().initialize(context)
        if not context.system_properties.get("limit_max_image_pixels", True):
            Image.MAX_IMAGE_PIXELS = None
        section = self.model_yaml_config.get("handler")
        is_ours = isinstance(self.image_processing, PictureTransform)
        if is_ours and isinstance(section, dict) and any(key in section for key in _TRANSFORM_KEYS):
            self.image_processing = PictureTransform.from_config({**self.transform_defaults, **section})

    @timed
    def preprocess(self, data: list[Any]) -> Any:
        """B rows in; float32 [B, C, H, W] out, a tensor on the device, or an array for an ONNX model.

        Rows that are nested lists are taken as they are, without any transform. Raises BadPicture for a row that is
        neither a picture nor numbers, or whose shape is not that of the others.
        """
        transform = self.image_processing
        if isinstance(transform, PictureTransform):
            batch: Any = _fill_batch([picture_value(row) for row in data], transform)
            if self.takes_arrays:
                return batch
            from marserve_handlers.runtimes.tensors import as_tensor

            return as_tensor(batch, self.device)
        rows = [self._process_row(picture_value(row)) for row in data]
        if self.takes_arrays:
            return np.stack([np.asarray(row) for row in rows])
        from marserve_handlers.runtimes.tensors import stack

        return stack(rows, self.device)

    def get_insights(self, tensor_data: Any, raw_data: Any, target: Any = 0) -> Any:
        """How much each pixel spoke for class `target`: integrated gradients, nested lists of the input's shape.

        Needs the package captum and a model in torch that scores classes; answers 501 without, and 400 for a class that
        the model does not have.
        """
        try:
            importlib.import_module("captum.attr")
        except ImportError:
            raise PredictionException("Explanations of pictures need the package captum on the server.", 501) from None
        if self.takes_arrays:
            raise PredictionException("Explanations of pictures need a model in torch; this one is ONNX.", 501)
        from marserve_handlers.runtimes.attributions import NoScores, attribute_pixels

        try:
            return attribute_pixels(self.model, tensor_data, read_target(target)).tolist()
        except NoScores as error:
            raise PredictionException(f"Explanations of pictures need scores of classes. {error}", 501) from error

    def _process_row(self, value: Any) -> Any:
        if isinstance(value, (bytes, bytearray, str)):
            return self.image_processing(open_picture(value))
        return _numbers(value)


def picture_value(row: Any) -> Any:
    """As `value_of`, and BadPicture for a form without the field in which a picture is looked for."""
    if isinstance(row, dict) and not row.keys() & {"data", "body"}:
        # curl --data-binary calls any file a form by default.
        raise BadPicture(
            "The request holds no picture: its body came as a form (application/x-www-form-urlencoded, as curl "
            "--data-binary says by itself) without the field data. Send an image file with curl -T FILE, or with a "
            "Content-Type of its own; over gRPC as the input data."
        )
    return value_of(row)


def read_array(value: Any, transform: PictureTransform) -> FloatArray:
    """One row's value as an array: a picture through `transform`, nested lists as they are. Raises BadPicture."""
    if isinstance(value, (bytes, bytearray, str)):
        return transform.to_array(open_picture(value))
    return _numbers(value)


def _fill_batch(values: list[Any], transform: PictureTransform) -> FloatArray:
    """One array [B, C, H, W]; pictures of one known size are written straight into their place."""
    if transform.size is not None and all(isinstance(value, (bytes, bytearray, str)) for value in values):
        batch = np.empty((len(values), transform.channels, *transform.size), dtype=np.float32)
        for place, value in zip(batch, values, strict=True):
            transform.fill(open_picture(value), place)
        return batch
    rows = [read_array(value, transform) for value in values]
    if any(row.shape != rows[0].shape for row in rows):
        raise BadPicture("The picture's size is not the one that this model takes.")
    return np.stack(rows)


def _numbers(value: Any) -> FloatArray:
    if not isinstance(value, list):
        raise BadPicture("The request holds no picture: send an image file as the body, or as the form field data.")
    try:
        return np.asarray(value, dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise BadPicture(
            "The request's lists are no picture: they must hold numbers, in rows of one length."
        ) from error
