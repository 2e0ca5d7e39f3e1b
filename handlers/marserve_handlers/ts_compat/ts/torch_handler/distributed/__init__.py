"""TorchServe's name for handlers of several ranks."""
