"""What runs models is built as the settings say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from marserve.app.building.models import build_waiting_line
from marserve.machine.describe import Machine
from marserve.settings import Settings

MIB = 1 << 20


@pytest.mark.parametrize(
    ("model_memory", "machine_mib", "budget_mib"),
    [(5 * MIB, 0, 5), ("auto", 1024, 768), ("auto", 100, 0), (0, 1024, 0)],
)
def test_the_settings_bound_the_memory_or_do_not(model_memory: Any, machine_mib: int, budget_mib: int) -> None:
    """In bytes, or by the machine's; 0 is no bound."""
    settings = cast("Settings", SimpleNamespace(model_memory=model_memory, least_residence=1.0))
    machine = cast("Machine", SimpleNamespace(memory_bytes=machine_mib * MIB))

    line = build_waiting_line(settings, machine, None)

    assert line.ledger.budget_bytes == budget_mib * MIB
