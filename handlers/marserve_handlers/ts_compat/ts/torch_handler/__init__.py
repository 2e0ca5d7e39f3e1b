"""TorchServe's name for the built-in handlers.

Each module hands out the one of its name in `marserve_handlers` (`base_handler` is `base`).
"""
