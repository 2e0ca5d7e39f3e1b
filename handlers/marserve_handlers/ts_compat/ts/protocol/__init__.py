"""TorchServe's name for its wire protocol."""
