"""TorchServe's name for what loaded handlers."""

from marserve_handlers.support.torchserve.internals import ModelLoader, ModelLoaderFactory, TsModelLoader

__all__ = ["ModelLoader", "ModelLoaderFactory", "TsModelLoader"]
