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
    yield from _models(handle, _MOST_DEPTH, set())


def is_session(model: Any) -> bool:
    """Whether a model is a session of ONNX Runtime, by its class's name."""
    return type(model).__name__ == "InferenceSession"


def _models(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    if depth < 0 or id(value) in seen or len(seen) > _MOST_VALUES:
        return
    seen.add(id(value))
    torch = sys.modules.get("torch")
    if (torch is not None and isinstance(value, torch.nn.Module)) or is_session(value):
        yield value
    elif inspect.ismethod(value):
        yield from _models(value.__self__, depth, seen)
        yield from _models(value.__func__, depth, seen)
    elif inspect.isfunction(value):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                yield from _models(cell.cell_contents, depth - 1, seen)
        for held in list(value.__globals__.values()):
            if not inspect.isfunction(held) and not inspect.ismodule(held) and not inspect.isclass(held):
                yield from _models(held, depth - 1, seen)
    elif not inspect.isclass(value) and not inspect.ismodule(value):
        for held in list(getattr(value, "__dict__", {}).values()):
            yield from _models(held, depth - 1, seen)
