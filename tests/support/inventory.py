"""The lists of what TorchServe 0.12 has: routes, keys, flags, names, metrics. Tests walk them entry by entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INVENTORY = Path(__file__).parents[1] / "contract" / "torchserve_inventory.json"


def inventory(part: str) -> Any:
    """One list of the inventory (or a mapping, where its entries have names)."""
    return json.loads(INVENTORY.read_text("utf-8"))[part]
