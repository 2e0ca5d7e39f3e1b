"""TorchServe's name for `BodyEnvelope`."""

from marserve_handlers.envelopes.body import BodyEnvelope

__all__ = ["BodyEnvelope"]
