"""TorchServe's name for its command."""

from marserve_handlers.support.torchserve.internals import TS_NAMESPACE
from marserve_handlers.support.torchserve.launcher import load_properties
from marserve_handlers.support.torchserve.launcher import run_torchserve as start

__all__ = ["TS_NAMESPACE", "load_properties", "start"]
