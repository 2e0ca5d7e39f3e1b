"""Tests for the tie between a process's life and its parent's."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from support.processes import living, until_blocking
from support.running_pool import worker_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end of the wire must do")

CHILD = """
import os, signal, sys
from marserve.worker.process.parent import die_with_parent
die_with_parent({parent})
print(os.getpid(), flush=True)
signal.pause()
"""


def test_a_killed_parent_takes_its_child_with_it() -> None:
    """The kernel sees to it: nobody is left to say anything."""
    parent_source = textwrap.dedent(
        """
        import os, signal, subprocess, sys
        subprocess.Popen([sys.executable, "-c", sys.argv[1].replace("{parent}", str(os.getpid()))])
        signal.pause()
        """
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_source, CHILD], env=dict(worker_environment()), stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())

        parent.kill()
        parent.wait()

    until_blocking(lambda: not living([child]), "the child is gone", timeout_s=2.0)


def test_a_child_whose_parent_is_another_ends_at_once() -> None:
    """The one that started it died before the tie was made."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.replace("{parent}", "1")],
        env=dict(worker_environment()),
        capture_output=True,
        timeout=20,
    )

    assert (done.returncode, done.stdout) == (0, b"")
