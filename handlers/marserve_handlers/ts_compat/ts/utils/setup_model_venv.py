"""TorchServe's name for what made environments of models."""

from marserve_handlers.support.torchserve.internals import create_venv, inherit_site_packages

__all__ = ["create_venv", "inherit_site_packages"]
