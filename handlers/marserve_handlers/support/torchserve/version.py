"""The version of TorchServe whose handlers' interface is offered under its import names."""

__version__ = "0.12.0"

version_path = __file__
"""Where the version is written."""
