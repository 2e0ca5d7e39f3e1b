"""TorchServe's name for `JSONEnvelope`."""

from marserve_handlers.envelopes.json import JSONEnvelope

__all__ = ["JSONEnvelope"]
