"""TorchServe's name for the older base classes of handlers."""
