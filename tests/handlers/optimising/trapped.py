"""Modules with the traps of exporting; tests look for their lines."""

from __future__ import annotations

from typing import Any

import torch

COUNT = 1


class OnSize(torch.nn.Module):  # type: ignore[misc]
    """Other arithmetic for larger batches."""

    def forward(self, rows: Any) -> Any:
        """Twice, or three times."""
        doubled = rows * 2
        if rows.shape[0] > 4:
            doubled = rows * 3
        return doubled


class Around(torch.nn.Module):  # type: ignore[misc]
    """The branch is in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = OnSize()

    def forward(self, rows: Any) -> Any:
        """One more."""
        return self.part(rows) + 1


class OnData(torch.nn.Module):  # type: ignore[misc]
    """Other arithmetic for other numbers."""

    def forward(self, rows: Any) -> Any:
        """Three times, or as it is."""
        if rows.sum() > 0:
            return rows * 3
        return rows


class Fixed(torch.nn.Module):  # type: ignore[misc]
    """Knows one batch size."""

    def forward(self, rows: Any) -> Any:
        """Two rows."""
        return rows.reshape(2, -1)


class Counts(torch.nn.Module):  # type: ignore[misc]
    """Keeps count in an attribute, a list and a global."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.seen: list[int] = []

    def forward(self, rows: Any) -> Any:
        """By how many calls there were."""
        global COUNT
        self.n += 1
        self.seen.append(1)
        COUNT = COUNT + 1
        total = rows * self.n
        return total * len(self.seen)


class Clean(torch.nn.Module):  # type: ignore[misc]
    """Changes names of its own alone."""

    def forward(self, rows: Any) -> Any:
        """Twice."""
        held = [rows]
        held.append(rows)
        held[0] = rows * 2
        return held[0]


class Weighs(torch.nn.Module):  # type: ignore[misc]
    """A layer with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, rows: Any) -> Any:
        """The scores."""
        return self.linear(rows)


class Sized(torch.nn.Module):  # type: ignore[misc]
    """Needs an argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 3)


class Masks(torch.nn.Module):  # type: ignore[misc]
    """Gives numbers that are not finite."""

    def forward(self, rows: Any) -> Any:
        """Minus infinity, one that is none, and a number."""
        return torch.cat([rows * float("-inf"), rows * float("nan"), rows], dim=1)
