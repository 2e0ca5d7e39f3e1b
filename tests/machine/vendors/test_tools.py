"""Vendors' tools: what they print counts whatever their status, and no time is lost to one that does not end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from marserve.machine.vendors.tools import MOST_BYTES, Tools, each_within
from support.processes import living, until_blocking


def test_a_tool_that_succeeds_has_no_complaint() -> None:
    """Its text is what it printed."""
    assert Tools()(["echo", "whole"]) == ("whole\n", 0, "")


def test_a_tool_that_fails_keeps_what_it_printed() -> None:
    """Beside its status and its own words, in one line."""
    told = Tools()(["sh", "-c", "echo row; echo 'infoROM is'  >&2; echo corrupted >&2; exit 14"])

    assert told == ("row\n", 14, "sh ended with status 14: infoROM is corrupted")


def test_a_tool_that_cannot_be_started_is_told() -> None:
    """Nothing is raised."""
    told = Tools()(["no-such-tool-anywhere"])

    assert (told.text, told.status) == ("", None)
    assert told.complaint.startswith("no-such-tool-anywhere could not be started")


def test_all_calls_share_one_time() -> None:
    """After one that used it up nothing more is started."""
    run = Tools(0.2)

    first = run(["sleep", "60"])
    second = run(["touch", "/nonexistent/never"])

    assert first.complaint == "sleep did not answer within 0.2 s"
    assert second.complaint == "touch did not answer within 0.2 s"


def test_a_tool_that_is_over_its_time_is_ended(tmp_path: Path) -> None:
    """No process of it is left."""
    pid_file = tmp_path / "pid"

    Tools(0.5)(["sh", "-c", f"echo $$ > {pid_file}; exec sleep 60"])

    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_what_a_tool_started_ends_with_it_where_it_leads_a_group(tmp_path: Path) -> None:
    """A script may have started the program that hangs."""
    pid_file = tmp_path / "pids"
    run = Tools(0.5, {"NUMBER": "60"}, ends_groups=True)

    run(["/bin/sh", "-c", f"/bin/sleep $NUMBER & echo $$ $! > {pid_file}; wait"])

    pids = [int(pid) for pid in pid_file.read_text().split()]
    until_blocking(lambda: not living(pids), "that both have ended")


@pytest.mark.parametrize("where", ["", ">&2"])
def test_a_tool_that_prints_without_end_is_ended(where: str) -> None:
    """What it printed is dropped, on either output; the next tool is started."""
    run = Tools(60)

    told = run(["sh", "-c", f"exec yes {where}"])

    assert (told.text, told.status) == ("", None)
    assert told.complaint == f"sh printed more than {MOST_BYTES} bytes"
    assert not run.is_stuck
    assert run(["echo", "next"]).text == "next\n"


def test_long_output_within_the_bound_is_kept_whole() -> None:
    """More than a pipe holds, on both outputs at once."""
    told = Tools(60)(["sh", "-c", "yes | head -c 300000; yes | head -c 300000 >&2"])

    assert (len(told.text), told.status) == (300_000, 0)


def test_cancelling_ends_what_runs_and_starts_nothing_more(tmp_path: Path) -> None:
    """From another thread, as a signal's handler has it done."""
    run = Tools(60)
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)

    def cancel() -> None:
        fifo.read_text()  # blocks until the tool runs
        run.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    began = time.monotonic()
    told = run(["sh", "-c", f"echo begun > {fifo}; exec sleep 60"])
    thread.join()

    assert time.monotonic() - began < 30
    assert told.status == -signal.SIGKILL
    assert run(["echo", "more"]).status is None


def test_a_tool_that_has_not_ended_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for its driver does not even go when it is killed: here SIGKILL does nothing."""
    run = each_within(0.1)
    import subprocess

    real, held = subprocess.Popen.kill, []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: held.append(process))

    first = run(["sleep", "60"])
    second = run(["echo", "again"])
    real(held[0])
    held[0].wait()
    third = run(["echo", "again"])

    assert first.status is None
    assert second.complaint == "echo has not ended"
    assert third.text == "again\n"
