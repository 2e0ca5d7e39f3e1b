"""Tests for what is said of a worker that was ended for its time: busy, wedged, stopped, or not begun."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from marserve.pool.slots.hang_report import Sample, describe_hang, describe_hangs, parse_stat, read_sample

STAT = "4711 (py (th) on) S 1 4711 4711 0 -1 4194304 9 0 0 0 250 50 0 0 20 0 1 0 100 1 1"


def test_a_look_is_read_from_the_processs_own_table() -> None:
    """The program's name may hold spaces and parentheses; user and system time count together."""
    assert parse_stat(STAT, now=7.0, ticks_per_s=100) == Sample(7.0, "S", 3.0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by way of /proc")
def test_a_process_that_computes_is_seen_to() -> None:
    """Ourselves, for a moment."""
    first = read_sample(os.getpid(), 0.0)
    while time.process_time() < 0.02 + (first.cpu_s if first else 0.0):
        pass
    last = read_sample(os.getpid(), 1.0)

    assert first is not None
    assert last is not None
    assert last.cpu_s > first.cpu_s


def test_a_process_that_is_gone_cannot_be_looked_at(tmp_path: Path) -> None:
    """Nor one whose table makes no sense."""
    (tmp_path / "9").mkdir()
    (tmp_path / "9/stat").write_text("9 (x) S")

    assert read_sample(8, 0.0, tmp_path) is None
    assert read_sample(9, 0.0, tmp_path) is None
    assert describe_hang(None, None, 1.0) == ""


@pytest.mark.parametrize(
    ("state", "used_s", "ran_s", "said"),
    [
        ("R", 0.98, 12.34, "busy in a long batch: the batch has run for 12.3 s, and it used 98% of a core"),
        ("S", 1.9, 12.0, "busy in a long batch"),
        ("R", 0.1, 12.0, "busy in a long batch: the batch has run for 12.0 s, and it used 10% of a core"),
        ("R", 0.9, None, "busy with something else: it never began the batch"),
        ("S", 0.0, 3.0, "wedged, waiting for something that does not come: the batch has run for 3.0 s"),
        ("S", 0.01, None, "wedged, waiting for something that does not come: it never began the batch"),
        ("S", 0.2, 3.0, "slow: the batch has run for 3.0 s, and it used 20% of a core in the last 1.0 s"),
        ("T", 0.0, 3.0, "the process is stopped (state T)"),
        ("t", 0.0, 3.0, "the process is stopped (state t)"),
        ("D", 0.0, 3.0, "inside the kernel (state D)"),
    ],
)
def test_busy_is_told_from_wedged(state: str, used_s: float, ran_s: float | None, said: str) -> None:
    """By the processor time between two looks, and by the state at the second."""
    told = describe_hang(Sample(10.0, "S", 5.0), Sample(11.0, state, 5.0 + used_s), ran_s)

    assert said in told


def test_with_one_look_only_the_state_and_the_batch_are_told() -> None:
    """The first look may have failed."""
    assert describe_hang(None, Sample(11.0, "R", 5.0), 2.0) == "the batch has run for 2.0 s"
    assert "stopped" in describe_hang(None, Sample(11.0, "T", 5.0), 2.0)


def test_of_a_group_every_rank_is_told_of() -> None:
    """Which of them is stopped matters: the others only wait for it."""
    first = [Sample(10.0, "S", 1.0), Sample(10.0, "S", 1.0)]
    last = [Sample(11.0, "S", 1.0), Sample(11.0, "T", 1.0)]

    told = describe_hangs(first, last, 5.0)

    assert told.startswith("rank 0: wedged, waiting for something that does not come")
    assert told.endswith("rank 1: the process is stopped (state T): a signal or a debugger holds it")
    assert describe_hangs(first[:1], last[:1], 5.0) == describe_hang(first[0], last[0], 5.0)
    assert describe_hangs([], last, 5.0).count("rank") == 2
    assert describe_hangs([], [None, None], None) == ""
