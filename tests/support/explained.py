"""What a real server says of one of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from marserve.telemetry.timeline import STAGES
from support.server import Server, poll


def explained(server: Server, request_id: str) -> dict[str, Any]:
    """Where a request's time went, once it has ended. Its stages are the known ones and add up to the whole."""
    for _ in poll(5, f"request {request_id} is recorded"):
        answer = server.client.get(f"{server.management}/requests/{request_id}")
        if answer.status_code == 200:
            break
    found: dict[str, Any] = answer.json()
    assert [stage["name"] for stage in found["stages"]] == list(STAGES)
    assert sum(stage["ms"] for stage in found["stages"]) == pytest.approx(found["wall_ms"], rel=0.02, abs=0.1)
    return found
