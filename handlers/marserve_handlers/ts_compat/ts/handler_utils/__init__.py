"""TorchServe's name for tools of handlers."""
