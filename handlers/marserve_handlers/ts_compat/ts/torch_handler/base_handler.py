"""TorchServe's name for `marserve_handlers.base`."""

from marserve_handlers.base import BaseHandler
from marserve_handlers.support.torchserve.capabilities import (
    IPEX_AVAILABLE,
    ONNX_AVAILABLE,
    PROFILER_AVAILABLE,
    PT2_AVAILABLE,
    PT230_AVAILABLE,
    XLA_AVAILABLE,
    setup_ort_session,
)

__all__ = [
    "IPEX_AVAILABLE",
    "ONNX_AVAILABLE",
    "PROFILER_AVAILABLE",
    "PT2_AVAILABLE",
    "PT230_AVAILABLE",
    "XLA_AVAILABLE",
    "BaseHandler",
    "setup_ort_session",
]
