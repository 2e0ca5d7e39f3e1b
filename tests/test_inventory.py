"""The inventory of what TorchServe has is walked whole: no list of it is without a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.inventory import INVENTORY

HERE = Path(__file__).parent
LISTS = [name for name in json.loads(INVENTORY.read_text("utf-8")) if name != "about"]


@pytest.mark.parametrize("name", LISTS)
def test_every_list_of_the_inventory_is_walked(name: str) -> None:
    """Some test asks for it by name."""
    asked = f'inventory("{name}")'

    assert any(asked in path.read_text("utf-8") for path in HERE.glob("*/**/test_*.py"))
