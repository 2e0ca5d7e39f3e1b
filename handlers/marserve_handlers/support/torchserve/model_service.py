"""The older base classes of handlers, from before `BaseHandler`: subclassed by archives that are old enough."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ModelService(ABC):
    """A handler that overrides `inference`; `handle` calls it with the batch's rows."""

    def __init__(
        self, model_name: str = "", model_dir: str = "", manifest: dict[str, Any] | None = None, gpu: int | None = None
    ) -> None:
        self.model_name = model_name
        self.model_dir = model_dir
        self.manifest = manifest
        self.gpu = gpu
        self.context: Any = None
        self.ctx: Any = gpu
        self._signature: Any = None

    def initialize(self, context: Any) -> None:
        """Take name, folder, manifest and device from the context; subclasses load their model here, too."""
        self.context = context
        self.model_name = context.model_name
        self.model_dir = context.system_properties.get("model_dir")
        self.manifest = context.manifest
        self.gpu = self.ctx = context.system_properties.get("gpu_id")

    @abstractmethod
    def inference(self, data: list[Any]) -> list[Any]:
        """Answer the batch's rows: a list as long as `data`."""

    def ping(self) -> Any:
        """The answer to a health check; None unless overridden."""
        return None

    def signature(self) -> Any:
        """What the model takes and gives; None unless overridden."""
        return self._signature

    def handle(self, data: list[Any], context: Any) -> list[Any]:
        """Answer a batch."""
        self.context = context
        return self.inference(data)


class SingleNodeService(ModelService):
    """A model service in three steps, each of which may be overridden; `_inference` must be."""

    def inference(self, data: list[Any]) -> list[Any]:
        """`_preprocess`, `_inference`, `_postprocess`, one after the other."""
        answers: list[Any] = self._postprocess(self._inference(self._preprocess(data)))
        return answers

    @abstractmethod
    def _inference(self, data: Any) -> Any:
        """Run the model on what `_preprocess` gave."""

    def _preprocess(self, data: Any) -> Any:
        """What the model takes; the rows themselves unless overridden."""
        return data

    def _postprocess(self, data: Any) -> Any:
        """A list with an answer for each row; the model's output unless overridden."""
        return data
