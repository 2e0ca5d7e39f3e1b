"""TorchServe's name for `BaseEnvelope`."""

from marserve_handlers.envelopes.base import BaseEnvelope

__all__ = ["BaseEnvelope"]
