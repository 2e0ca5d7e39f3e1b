"""What a model's author imports. The names of `_EXPORTED` are here, too, imported when they are first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from marserve_handlers.calling import CallFailed as CallFailed
    from marserve_handlers.calling import ModelAnswer as ModelAnswer
    from marserve_handlers.context import send_intermediate_predict_response as send_intermediate_predict_response
    from marserve_handlers.declared.declaration import Tensor as Tensor
    from marserve_handlers.declared.decorator import model as model
    from marserve_handlers.declared.events import Event as Event
    from marserve_handlers.errors import BadInput as BadInput
    from marserve_handlers.errors import PredictionException as PredictionException

# The module of each name. `import marserve_handlers` alone imports none of them.
_EXPORTED: Final = {
    "BadInput": "marserve_handlers.errors",
    "CallFailed": "marserve_handlers.calling",
    "Event": "marserve_handlers.declared.events",
    "ModelAnswer": "marserve_handlers.calling",
    "PredictionException": "marserve_handlers.errors",
    "Tensor": "marserve_handlers.declared.declaration",
    "model": "marserve_handlers.declared.decorator",
    "send_intermediate_predict_response": "marserve_handlers.context",
}


def __getattr__(name: str) -> object:
    module = _EXPORTED.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTED})
