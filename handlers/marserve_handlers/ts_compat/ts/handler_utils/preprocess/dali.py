"""TorchServe's name for pipelines of DALI."""

from marserve_handlers.dali import get_dali_pipeline

__all__ = ["get_dali_pipeline"]
