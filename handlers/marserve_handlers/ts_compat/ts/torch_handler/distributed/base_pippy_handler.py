"""TorchServe's name for `BasePippyHandler`."""

from marserve_handlers.distributed.pippy import BasePippyHandler

__all__ = ["BasePippyHandler"]
