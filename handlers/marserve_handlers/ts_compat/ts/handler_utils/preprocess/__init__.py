"""TorchServe's name for preprocessing off the CPU."""
