"""DeepSpeed's inference engine, where `deepspeed` is installed."""

from __future__ import annotations

import importlib
import json
import os
from abc import ABC
from pathlib import Path
from typing import Any

from marserve_handlers.base import BaseHandler
from marserve_handlers.errors import ModelNotLoadable


def create_checkpoints_json(model_path: str, checkpoints_json: str) -> None:
    """Write the list of checkpoint files below `model_path` as DeepSpeed reads it, to the file `checkpoints_json`."""
    root = Path(model_path)
    files = sorted(
        str(file.relative_to(root)) for ending in ("*.bin", "*.pt", "*.safetensors") for file in root.rglob(ending)
    )
    document = {"type": "ds_model", "checkpoints": files, "version": 1.0}
    Path(checkpoints_json).write_text(json.dumps(document), encoding="utf-8")


def get_ds_engine(model: Any, ctx: Any) -> Any:
    """The engine around `model`, set up as `deepspeed` of the model's configuration says.

    `config` names DeepSpeed's JSON file in the archive; `checkpoint` a file that `create_checkpoints_json` wrote, with
    the checkpoints below `handler.model_path`. Raises ModelNotLoadable without the package, or without `config`.
    """
    configuration = ctx.model_yaml_config or {}
    settings = configuration.get("deepspeed")
    folder = str(ctx.system_properties.get("model_dir"))
    name = settings.get("config") if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or not name:
        raise ModelNotLoadable("The model's configuration has no deepspeed.config: name DeepSpeed's JSON file there.")
    path = os.path.join(folder, str(name))
    try:
        with open(path, encoding="utf-8") as file:
            options = json.load(file)
    except (OSError, ValueError) as error:
        raise ModelNotLoadable(f"DeepSpeed's file {name} cannot be read: {error}") from error
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ModuleNotFoundError:
        raise ModelNotLoadable("This handler needs the package deepspeed on the server.") from None
    checkpoint = settings.get("checkpoint")
    if checkpoint:
        options["checkpoint"] = os.path.join(folder, str(checkpoint))
        handler = configuration.get("handler")
        model_path = handler.get("model_path") if isinstance(handler, dict) else None
        if model_path:
            options["base_dir"] = os.path.join(folder, str(model_path))
    return deepspeed.init_inference(model, config=options)


class BaseDeepSpeedHandler(BaseHandler, ABC):
    """A handler of one rank of a group, which loads its model itself and gives it to `get_ds_engine`."""

    def initialize(self, ctx: Any) -> None:
        """Read rank and device from the environment. Loads no model."""
        from marserve_handlers.runtimes.ranks import device_of_rank

        self.context = ctx
        self.manifest = ctx.manifest
        self.model_yaml_config = ctx.model_yaml_config or {}
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = device_of_rank(self.local_rank)
        self.map_location = self.device.type
