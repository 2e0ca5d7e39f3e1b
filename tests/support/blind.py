"""Workers by their keys, for tests that nobody looks at all of them: with hundreds that costs more than all else."""

from __future__ import annotations

from typing import Any


class Blind(dict[str, Any]):
    """A dictionary that may be asked for single keys, and for nothing else but its size."""

    def _refuse(self) -> Any:
        raise AssertionError("something looked at every worker")

    __iter__ = keys = values = items = _refuse  # type: ignore[assignment]
