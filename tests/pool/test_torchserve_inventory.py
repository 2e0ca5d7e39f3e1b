"""A walk of what TorchServe's operators know of workers: the pauses between restarts, and the states in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from marserve.pool.slots import slot
from marserve.pool.slots.restart_policy import RETRY_DELAYS_S
from support.inventory import inventory

# States that a log line names. The others are no states here, for these reasons.
LEFT_OUT = {
    "WORKER_STOPPED": "a worker's end is logged with its cause, and described as lastDeath",
    "WORKER_ERROR": "a refused load is logged with its traceback, and described as lastDeath",
    "WORKER_SCALED_DOWN": "a worker that is not wanted any more is drained and then gone",
}


def test_the_pauses_between_restarts_are_torchserves() -> None:
    """One after the other."""
    assert list(RETRY_DELAYS_S) == inventory("retry_delays_s")


@pytest.mark.parametrize("state", inventory("worker_states"))
def test_every_state_is_logged_or_left_out_with_a_reason(state: str) -> None:
    """The line that says that a worker has loaded its model is what people look for."""
    lines = [line for line in Path(slot.__file__).read_text("utf-8").splitlines() if "State change" in line]

    assert any(state in line for line in lines) != bool(LEFT_OUT.get(state))
