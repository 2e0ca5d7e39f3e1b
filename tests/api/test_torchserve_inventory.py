"""A walk of TorchServe's error types: each is answered by some error of ours, with the same status."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.api.errors import _TABLE, INTERNAL
from support.inventory import inventory


@pytest.mark.parametrize("entry", inventory("error_types"), ids=lambda entry: entry["type"])
def test_every_error_type_is_answered_with_its_status(entry: dict[str, Any]) -> None:
    """The table of errors has the pair; what is in no table is an internal error."""
    pairs = {*((word, status) for status, word in _TABLE.values()), (INTERNAL, 500)}

    assert (entry["type"], entry["status"]) in pairs
