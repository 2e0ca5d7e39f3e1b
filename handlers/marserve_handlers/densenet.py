"""The built-in handler `densenet_handler`: a saved tensor in, the model's output as a tensor out."""

from __future__ import annotations

import os
from typing import Any

from marserve_handlers.base import value_of
from marserve_handlers.context import Context
from marserve_handlers.errors import ModelNotLoadable, PredictionException
from marserve_handlers.support.devices.devices import choose_device


class DenseNetHandler:
    """Loads an eager or TorchScript model, and runs it on what `torch.save` wrote; the answer is the raw output.

    Each row is a call of its own: tensors of any shapes may stand in a batch.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.mapping: dict[str, str] | None = None
        self.device: Any = None
        self.initialized = False
        self.context: Any = None
        self.manifest: dict[str, Any] | None = None
        self.map_location: str | None = None

    def initialize(self, context: Context) -> None:
        """Load the model that the manifest names onto the worker's device. Raises ModelNotLoadable."""
        from marserve_handlers.runtimes.tensors import own_device

        self.context = context
        self.manifest = context.manifest
        properties = context.system_properties
        self.device = own_device(context, properties.get("gpu_id"), (context.model_yaml_config or {}).get("deviceType"))
        self.map_location = self.device.type
        entry = (self.manifest or {}).get("model") or {}
        model_dir, serialized = str(properties.get("model_dir")), entry.get("serializedFile")
        if not serialized:
            raise ModelNotLoadable("No model weights could be loaded: the manifest names no serializedFile.")
        path = os.path.join(model_dir, serialized)
        model_file = entry.get("modelFile")
        if model_file:
            self.model = self._load_pickled_model(model_dir, model_file, path)
        else:
            self.model = self._load_torchscript_model(path)
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        """The TorchScript model of that path, on `self.device`."""
        from marserve_handlers.runtimes.torchscript import load_torchscript

        return load_torchscript(model_pt_path, self.device or choose_device(None, ()))

    def _load_pickled_model(self, model_dir: str, model_file: str, model_pt_path: str) -> Any:
        """The eager model of `model_file` with the weights of `model_pt_path`, on `self.device`."""
        from marserve_handlers.runtimes.eager import load_eager

        return load_eager(model_dir, model_file, model_pt_path, self.device or choose_device(None, ()))

    def preprocess(self, data: list[Any]) -> list[Any]:
        """One tensor a row. Raises PredictionException (400) for what is no saved tensor."""
        from marserve_handlers.runtimes.tensors import read_tensor

        tensors = []
        for row in data:
            value = value_of(row)
            if not isinstance(value, (bytes, bytearray)):
                raise PredictionException("The request holds no tensor: send the bytes that torch.save writes.", 400)
            try:
                tensors.append(read_tensor(value))
            except ValueError as error:
                raise PredictionException(f"The request holds no tensor: {str(error).rstrip('.')}.", 400) from None
        return tensors

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model on one tensor, moved to the device."""
        from marserve_handlers.runtimes.tensors import run

        return run(self.model, data, self.device, args, kwargs)

    def postprocess(self, data: list[Any]) -> list[Any]:
        """The outputs as they are, where the client can load them: on the CPU."""
        return [output.cpu() if hasattr(output, "cpu") else output for output in data]

    def handle(self, data: list[Any], context: Context) -> list[Any]:
        """Answer a batch: one raw output a row."""
        self.context = context
        return self.postprocess([self.inference(tensor) for tensor in self.preprocess(data)])
