"""TorchServe's name for `KServeEnvelope`."""

from marserve_handlers.envelopes.kserve import KServeEnvelope

__all__ = ["KServeEnvelope"]
