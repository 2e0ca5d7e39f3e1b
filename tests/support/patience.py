"""How long tests wait for what will come."""

from __future__ import annotations

# Long enough for a busy machine: only a test that fails waits so long.
PATIENCE_S = 30.0
