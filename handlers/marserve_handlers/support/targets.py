"""Which class an explanation is asked for: the request's field `target`, and whether the model has that class."""

from __future__ import annotations

from typing import Any

from marserve_handlers.errors import PredictionException


def read_target(target: Any) -> int:
    """The class that the field `target` names, as a number or as its digits. Raises PredictionException (400)."""
    if isinstance(target, (bytes, bytearray)):
        target = target.decode("ascii", "replace")
    if isinstance(target, float) and target.is_integer():
        target = int(target)
    text = str(target).strip()
    if isinstance(target, (int, str)) and not isinstance(target, bool) and text.isdecimal() and len(text) <= 9:
        return int(text)
    raise PredictionException(f"The field target must be the number of a class, from 0; it is {text[:50]!r}.", 400)


def check_target(target: int, classes: int) -> None:
    """Raise PredictionException (400) for a class that the model does not have."""
    if not 0 <= target < classes:
        raise PredictionException(
            f"The field target must be the number of a class, from 0 to {classes - 1}; it is {target}.", 400
        )
