"""TorchServe's name for tools of handlers of several ranks."""
