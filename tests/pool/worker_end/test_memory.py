"""Tests for what processes hold of memory, and for the kernel's count of those it killed."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from marserve.pool.worker_end.memory import (
    OomKills,
    count_oom_kills,
    find_events_file,
    held_bytes,
    own_bytes,
    past_peak_bytes,
    resident_bytes,
    watch_oom_kills,
)

ROLLUP = """\
55d0-7ffc ---p 00000000 00:00 0 [rollup]
Rss:              884 kB
Pss:              385 kB
Private_Clean:    100 kB
Private_Dirty:     76 kB
SwapPss:            4 kB
THPeligible:        0
"""


def test_a_processs_own_memory_is_what_it_wrote_and_what_is_in_swap(tmp_path: Path) -> None:
    """Not what it shares, nor files that could be read again."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(ROLLUP)

    assert own_bytes(7, tmp_path) == 80 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_processs_share_of_memory_is_what_it_holds_with_its_part_of_what_it_shares(tmp_path: Path) -> None:
    """Swap counts; both sizes are of one reading; a process that is gone holds nothing."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(ROLLUP)

    assert held_bytes(7, tmp_path) == (80 * 1024, 389 * 1024)
    assert held_bytes(8, tmp_path) == (0, 0)


def test_a_processs_past_peak_is_what_it_held_more_at_its_highest(tmp_path: Path) -> None:
    """What loading took for a moment; never less than nothing."""
    for pid, high in ((7, 900), (8, 500)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nVmHWM:\t   {high} kB\nVmRSS:\t   600 kB\n")

    assert past_peak_bytes(7, tmp_path) == 300 * 1024
    assert past_peak_bytes(8, tmp_path) == 0
    assert past_peak_bytes(9, tmp_path) == 0


def test_what_a_process_takes_shows() -> None:
    """Twenty megabytes of ours, once they are written to."""
    before, resident = own_bytes(os.getpid()), resident_bytes(os.getpid())
    with mmap.mmap(-1, 20_000_000) as taken:
        taken.write(b"x" * 20_000_000)

        assert own_bytes(os.getpid()) - before > 15_000_000
        assert resident_bytes(os.getpid()) - resident > 15_000_000


def test_of_a_process_that_is_gone_nothing_is_known(tmp_path: Path) -> None:
    """It may end between two looks."""
    assert own_bytes(7, tmp_path) == 0
    assert resident_bytes(7, tmp_path) == 0
    assert resident_bytes(-1) == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        ("oom_kill many\n", 0),
        ("", 0),
    ],
)
def test_the_kernels_count_is_read_in_both_versions(text: str, count: int) -> None:
    """`memory.events` of cgroup v2, `memory.oom_control` of v1."""
    assert count_oom_kills(text) == count


def test_the_file_that_counts_is_found_by_the_cgroup_and_its_mount(tmp_path: Path) -> None:
    """Version 2; version 1 where memory is its; in a container the root of the mount; none where there is none."""
    for folder, name in (("v2/pod/x", "memory.events"), ("v1", "memory.oom_control"), ("root", "memory.events")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).touch()
    v2 = f"cgroup2 {tmp_path}/v2 cgroup2 rw 0 0\n"
    v1 = f"cgroup {tmp_path}/cpu cgroup rw,cpu 0 0\ncgroup {tmp_path}/v1 cgroup rw,memory 0 0\n{v2}"
    inner = f"cgroup2 {tmp_path}/root cgroup2 rw 0 0\n"

    assert find_events_file("0::/pod/x\n", v2) == tmp_path / "v2/pod/x/memory.events"
    assert find_events_file("4:memory:/docker/y\n0::/\n", v1) == tmp_path / "v1/memory.oom_control"
    assert find_events_file("0::/../..\n", inner) == tmp_path / "root/memory.events"
    assert find_events_file("0::/pod/x\n", "proc /proc proc rw 0 0\nodd\n") is None
    assert find_events_file("odd\n", v2) is None


def test_a_kill_is_put_down_to_one_death(tmp_path: Path) -> None:
    """Two kills, two deaths; a third death has another cause."""
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 3\n")
    kills = OomKills(events)
    assert not kills.claim(now=0.0)

    events.write_text("oom_kill 5\n")

    assert [kills.claim(now=1.0), kills.claim(now=1.1), kills.claim(now=1.2)] == [True, True, False]


def test_a_kill_that_nobody_claims_was_of_another_process(tmp_path: Path) -> None:
    """A worker that is killed by hand a minute later did not run out of memory."""
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 0\n")
    kills = OomKills(events)
    events.write_text("oom_kill 1\n")

    kills.look(now=1.0)

    assert not kills.claim(now=60.0)


def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    """Nor with one that goes away."""
    assert not OomKills(None).claim(now=0.0)
    assert not OomKills(None).can_be_seen
    assert not OomKills(tmp_path / "gone").claim(now=0.0)
    assert not watch_oom_kills(tmp_path).can_be_seen
