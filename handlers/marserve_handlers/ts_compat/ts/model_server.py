"""TorchServe's name for its command."""

from marserve_handlers.launcher import load_properties
from marserve_handlers.launcher import run_torchserve as start
from marserve_handlers.torchserve_internals import TS_NAMESPACE

__all__ = ["TS_NAMESPACE", "load_properties", "start"]
