"""Tests for the limit that makes too much an exception; in processes of their own, for it cannot be undone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from marserve.worker.process.memory_limit import data_bytes
from support.running_pool import worker_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")


def run(source: str) -> str:
    """What a fresh interpreter prints that runs this."""
    done = subprocess.run(
        [sys.executable, "-c", "from marserve.worker.process.memory_limit import limit_memory\n" + source],
        env=dict(worker_environment()),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_over_the_limit_is_an_exception_and_what_is_under_is_not() -> None:
    """What the process held before does not count."""
    source = """
held = bytearray(150_000_000)
limit_memory(100_000_000)
bytearray(80_000_000)
try:
    bytearray(120_000_000)
except MemoryError:
    print("MemoryError")
"""

    assert run(source) == "MemoryError"


def test_no_limit_is_none() -> None:
    """0 leaves everything as it is."""
    source = "import resource; limit_memory(0); print(resource.getrlimit(resource.RLIMIT_DATA)[0] < 0)"

    assert run(source) == "True"


def test_a_templates_limit_is_set_anew_in_the_worker_whose_own_is_final() -> None:
    """A worker may allocate as much as it is allowed beyond what the template loaded."""
    source = """
import resource
limit_memory(100_000_000, is_template=True)
loaded = bytearray(80_000_000)
limit_memory(100_000_000)
more = bytearray(80_000_000)
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
print(soft == hard)
"""

    assert run(source) == "True"


def test_the_kernels_count_is_read(tmp_path: Path) -> None:
    """0 where there is none."""
    status = tmp_path / "status"
    status.write_text("VmRSS:\t 5 kB\nVmData:\t     360 kB\n")

    assert data_bytes(status) == 360 * 1024
    status.write_text("VmRSS:\t 5 kB\n")
    assert data_bytes(status) == 0
