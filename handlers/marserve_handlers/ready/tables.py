"""Rows of numbers, as models of features take them: a list of numbers, or an object with a number for each column."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marserve_handlers.errors import BadInput
from marserve_handlers.ready.items import join
from marserve_handlers.ready.options import shown

FEATURES = "features"


class Columns:
    """What one row of a model has: `count` numbers (None: any count), `names` of the columns where it knows them.

    With `takes_missing` a `null` is a missing value; else it is refused.
    """

    def __init__(self, count: int | None, names: Sequence[str] = (), *, takes_missing: bool) -> None:
        self.count = count
        self.names = list(names)
        self._takes_missing = takes_missing

    def read(self, value: Any, where: str) -> NDArray[np.float64]:
        """One row of features, float64 [count]. Raises BadInput."""
        field = where
        if isinstance(value, dict):
            field = join(where, FEATURES)
            value = as_document(value[FEATURES]) if value.keys() == {FEATURES} else self._in_order(value, where)
        if not isinstance(value, list):
            raise BadInput(f"expected a list of numbers, got {shown(value)}", field or FEATURES)
        if self.count is not None and len(value) != self.count:
            raise BadInput(f"expected {self.count} numbers, got {len(value)}", field or FEATURES)
        if set(map(type, value)) <= {int, float} and all(map(math.isfinite, value)):
            return np.array(value, dtype=np.float64)
        return np.array(
            [self._number(each, self._place(field, number)) for number, each in enumerate(value)], dtype=np.float64
        )

    def _in_order(self, value: dict[str, Any], where: str) -> list[Any]:
        if not self.names:
            raise BadInput(
                f'expected a list of numbers, or {{"{FEATURES}": […]}}: the model names no columns', where or None
            )
        for name in value:
            if name not in self.names:
                raise BadInput(f"is not known; the columns are {', '.join(self.names)}", join(where, str(name)))
        for name in self.names:
            if name not in value:
                raise BadInput("is missing", join(where, name))
        return [value[name] for name in self.names]

    def _place(self, field: str, number: int) -> str:
        return f"{field or FEATURES}[{number}]"

    def _number(self, value: Any, field: str) -> float:
        if value is None or (type(value) is float and math.isnan(value)):
            if self._takes_missing:
                return math.nan
            raise BadInput("expected a number, got null; this model takes no missing values", field)
        if type(value) not in (int, float) or math.isinf(value):
            raise BadInput(f"expected a number, got {shown(value)}", field)
        return float(value)


def is_table(value: Any) -> bool:
    """Whether a request's value is a list of rows, and not one row."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, (list, dict)) for each in value)


def as_document(value: Any) -> Any:
    """JSON that came as text or bytes, decoded. Raises BadInput."""
    if not isinstance(value, (str, bytes, bytearray)):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"The request is not JSON: {error}") from None


def plain(value: Any) -> Any:
    """An array, or a number of numpy's, as JSON has it."""
    return value.tolist() if hasattr(value, "tolist") else value


def scored(rows: Any, labels: Sequence[str] | None) -> list[Any]:
    """An answer for each row of scores [n] or [n, classes]: the numbers, or with labels a dict of label to score.

    With two labels a row of one number is the probability of the second one.
    """
    found: list[Any] = plain(rows)
    if labels is None:
        return found
    if found and not isinstance(found[0], list):
        found = [[1 - each, each] for each in found]
    return [dict(zip(labels, row, strict=True)) for row in found]
