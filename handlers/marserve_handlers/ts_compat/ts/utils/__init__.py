"""TorchServe's name for odds and ends."""
