"""TorchServe's name for what its tests offered to others'."""
