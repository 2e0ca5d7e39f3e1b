"""When a worker has served long enough and is replaced by a fresh one. Pure.

For handlers that leak memory or descriptors, or become slower. The replacement is loaded first (`succession.py`), so
that no request waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecyclePolicy:
    """The bounds of one worker's life; 0 for none. Seconds and bytes."""

    max_requests: int = 0
    max_age_s: float = 0.0
    max_growth_bytes: int = 0

    @property
    def needs_looks(self) -> bool:
        """Whether workers must be looked at from time to time, which the bound on requests does not need."""
        return self.max_age_s > 0 or self.max_growth_bytes > 0

    def reason(self, *, requests: int, age_s: float, growth_bytes: int) -> str | None:
        """Why a worker with these counts should be replaced: `requests`, `age` or `growth`; None if it should stay."""
        if 0 < self.max_requests <= requests:
            return "requests"
        if 0 < self.max_age_s <= age_s:
            return "age"
        if 0 < self.max_growth_bytes < growth_bytes:
            return "growth"
        return None
