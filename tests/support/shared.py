"""The data that lies beside the checkout, for tests that need more than a clone holds."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


def shared(*parts: str) -> Path:
    """A file or folder of `../shared`; the test is skipped, saying so, where it is missing."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs ../shared/{'/'.join(parts)} beside the checkout")
    return path
