"""What a worker sets of its own process, and its status at the end; `test_loop_orders.py` has the rest."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from marserve.worker.process.own_process import LEVEL_MARK, LevelFormatter, exit_status


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (3, 3), (True, 1), ("words", 1), (-1, 255), (256, 0), (2**70, 0)]
)
def test_an_exits_status_is_what_a_shell_would_see(code: Any, status: int) -> None:
    """Python's rules, and the system's eight bits."""
    assert exit_status(SystemExit(code)) == status


def test_every_line_of_a_record_carries_its_level() -> None:
    """A traceback has many."""
    record = logging.LogRecord("n", logging.ERROR, "p", 1, "one\ntwo %s", ("three",), None)

    text = LevelFormatter().format(record)

    mark = f"{LEVEL_MARK}ERROR{LEVEL_MARK}"
    assert text == f"{mark}one\n{mark}two three"
