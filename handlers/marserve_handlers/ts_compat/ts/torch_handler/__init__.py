"""TorchServe's name for the built-in handlers."""
