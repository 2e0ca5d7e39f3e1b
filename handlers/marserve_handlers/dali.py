"""Handlers that decode and transform pictures with NVIDIA DALI, on the GPU, where `nvidia.dali` is installed."""

from __future__ import annotations

import importlib
import os
from abc import ABC
from typing import Any

import numpy as np

from marserve_handlers.base import BaseHandler
from marserve_handlers.context import Context
from marserve_handlers.errors import BadPicture, ModelNotLoadable
from marserve_handlers.image_classifier import ImageClassifier
from marserve_handlers.vision import VisionHandler, picture_value

SOURCE = "my_source"
"""The name of the pipeline's external source where the configuration says nothing."""


def get_dali_pipeline(ctx: Any) -> Any:
    """The serialized pipeline of the archive, built, as `dali` of the model's configuration says.

    `pipeline_file` names it (the one `*.dali` otherwise); `batch_size`, `num_threads`, `device_id` and `seed` are the
    pipeline's. Raises ModelNotLoadable without the package, and without such a file.
    """
    folder = str(ctx.system_properties.get("model_dir"))
    settings = read_dali_settings(ctx)
    name = settings.get("pipeline_file")
    if not name:
        found = sorted(entry for entry in os.listdir(folder) if entry.endswith(".dali"))
        if len(found) != 1:
            raise ModelNotLoadable(
                f"The archive holds {len(found)} files *.dali; name the pipeline's in dali.pipeline_file."
            )
        name = found[0]
    path = os.path.join(folder, str(name))
    if not os.path.isfile(path):
        raise ModelNotLoadable(f"The pipeline {name} is not in the archive.")
    try:
        pipeline_type = importlib.import_module("nvidia.dali.pipeline").Pipeline
    except ModuleNotFoundError:
        raise ModelNotLoadable("This handler needs NVIDIA DALI on the server (package nvidia-dali-cuda).") from None
    options = {key: settings[key] for key in ("num_threads", "seed") if key in settings}
    device_id = settings.get("device_id", ctx.system_properties.get("gpu_id"))
    pipeline = pipeline_type.deserialize(
        filename=path,
        batch_size=int(settings.get("batch_size", ctx.system_properties.get("batch_size") or 1)),
        device_id=device_id,
        **options,
    )
    pipeline.build()
    return pipeline


def read_dali_settings(ctx: Any) -> dict[str, Any]:
    """`dali` of the model's configuration. Raises ModelNotLoadable when that is no map."""
    settings = (ctx.model_yaml_config or {}).get("dali") or {}
    if not isinstance(settings, dict):
        raise ModelNotLoadable(f"dali of the model's configuration is {settings!r}; it must be a map.")
    return settings


class DALIHandler(VisionHandler, ABC):
    """A vision handler whose pictures go through the archive's DALI pipeline instead of Pillow."""

    def initialize(self, context: Context) -> None:
        """Load the model and the pipeline. Raises ModelNotLoadable."""
        BaseHandler.initialize(self, context)
        self.source = str(read_dali_settings(context).get("source", SOURCE))
        self.pipeline = get_dali_pipeline(context)

    def preprocess(self, data: list[Any]) -> Any:
        """B image files in, the pipeline's first output as one tensor [B, …] on the device out. Raises BadPicture."""
        from marserve_handlers.runtimes.tensors import as_tensor, from_device

        values = [picture_value(row) for row in data]
        for value in values:
            if not isinstance(value, (bytes, bytearray)) or not value:
                raise BadPicture("The request holds no picture: send an image file as the body.")
        self.pipeline.feed_input(self.source, [np.frombuffer(bytes(value), dtype=np.uint8) for value in values])
        output = self.pipeline.run()[0]
        if hasattr(output, "as_cpu"):  # it is on the device, and stays there
            return from_device(output.as_tensor(), self.device)
        return as_tensor(np.asarray(output.as_array()), self.device)


class DALIImageClassifier(DALIHandler, ImageClassifier):
    """`image_classifier` behind a DALI pipeline."""

    def initialize(self, context: Context) -> None:
        """Load the model and the pipeline, and take `topk` from `handler` of the configuration."""
        DALIHandler.initialize(self, context)
        section = self.model_yaml_config.get("handler")
        if isinstance(section, dict) and "topk" in section:
            self.set_max_result_classes(section["topk"])
