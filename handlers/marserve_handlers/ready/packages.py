"""Imports the library of a ready handler, which need not be installed."""

from __future__ import annotations

import importlib
from typing import Any

from marserve_handlers.errors import ModelNotLoadable
from marserve_handlers.support.distributions import advice_for


def needed(module: str, handler: str, package: str) -> Any:
    """The module. Raises ModelNotLoadable with the package to install if it, or one that it imports, is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        is_other = (error.name or module).partition(".")[0] != module.partition(".")[0]
        missing = f" ({error.name} is missing)" if is_other else ""
        raise ModelNotLoadable(
            f"The handler {handler} needs the package {package}{missing}. {advice_for(error.name or module)}."
        ) from error
