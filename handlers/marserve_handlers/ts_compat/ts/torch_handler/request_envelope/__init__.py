"""TorchServe's name for `marserve_handlers.envelopes`."""
