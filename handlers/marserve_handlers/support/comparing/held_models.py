"""Where the models are that a handler holds: torch's modules and ONNX Runtime's sessions.

Neither library is imported for it: who holds a model has imported its library.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

_MOST_DEPTH = 5
_MOST_VALUES = 2000


def models_of(handle: Any) -> Iterator[Any]:
    """The models that a handler's function reaches by its object, its closure or its module, the outermost ones.

    Raises what the author's objects raise when they are looked at.
    """
    for model, _, _ in _models(handle, {}, "", _MOST_DEPTH, set()):
        yield model


def place_of(handle: Any, model: Any) -> tuple[dict[str, Any], str]:
    """Where a handler's function reaches a model: the attributes of an object, or a module's names, and the name there.

    No name if it is in a closure, or nowhere. Raises what the author's objects raise when they are looked at.
    """
    places = ((held, name) for found, held, name in _models(handle, {}, "", _MOST_DEPTH, set()) if found is model)
    return next(places, ({}, ""))


def is_session(model: Any) -> bool:
    """Whether a model is a session of ONNX Runtime, by its class's name."""
    return type(model).__name__ == "InferenceSession"


def _models(
    value: Any, holder: dict[str, Any], name: str, depth: int, seen: set[int]
) -> Iterator[tuple[Any, dict[str, Any], str]]:
    """Each model with where it was reached."""
    if depth < 0 or id(value) in seen or len(seen) > _MOST_VALUES:
        return
    seen.add(id(value))
    torch = sys.modules.get("torch")
    if (torch is not None and isinstance(value, torch.nn.Module)) or is_session(value):
        yield value, holder, name
    elif inspect.ismethod(value):
        yield from _models(value.__self__, {}, "", depth, seen)
        yield from _models(value.__func__, {}, "", depth, seen)
    elif inspect.isfunction(value):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                yield from _models(cell.cell_contents, {}, "", depth - 1, seen)
        names = value.__globals__
        for at, held in list(names.items()):
            if not inspect.isfunction(held) and not inspect.ismodule(held) and not inspect.isclass(held):
                yield from _models(held, names, at, depth - 1, seen)
    elif not inspect.isclass(value) and not inspect.ismodule(value):
        names = getattr(value, "__dict__", {})
        for at, held in list(names.items()):
            yield from _models(held, names, at, depth - 1, seen)
