"""TorchServe's name for `DALIHandler`."""

from marserve_handlers.dali import DALIHandler

__all__ = ["DALIHandler"]
