"""TorchServe's name for the built-in handlers: each module hands out the one of its name in `marserve_handlers` (`base_handler` is `base`)."""
