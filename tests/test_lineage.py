"""Tests for telling whose child a process is, though it has left its parent's group."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from marserve.lineage import VARIABLE, end_families, family, find_families
from marserve.shared_page import Page, create_page
from support.descriptors import more_descriptors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is told by Linux's /proc")


@contextmanager
def program(lineage: str | None, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own, with this lineage in its environment."""
    # It says when it is there: before `exec` its environment is ours.
    waits = "import sys; print('up', flush=True); sys.stdin.read()"
    variables = dict(environment) if lineage is None else {**environment, VARIABLE: lineage}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", waits],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.communicate()


def test_a_family_is_ended_and_nobody_else() -> None:
    """All below a lineage; not those above it, beside it, or whose words only begin alike."""
    with program("s/t/w") as own, program("s/t/w/x") as child, program("s/t") as parent, program("s/t/w2") as other:
        found = end_families({"s/t/w": 0})

        assert sorted(found) == sorted([own.pid, child.pid])
        assert own.wait(5) == child.wait(5) == -9
        assert parent.poll() is None
        assert other.poll() is None


def test_a_family_is_ended_by_a_server_of_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptors have numbers beyond those that `select` takes."""
    low = os.pidfd_open

    def open_high(pid: int) -> int:
        descriptor = low(pid)
        try:
            return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 1024)
        finally:
            os.close(descriptor)

    monkeypatch.setattr(os, "pidfd_open", open_high)

    with more_descriptors(), program("s/t/w") as one, program("s/t/w/x") as other:
        found = end_families({"s/t/w": 0})

        assert sorted(found) == sorted([one.pid, other.pid])
        assert one.wait(5) == other.wait(5) == -9


def test_a_program_that_only_names_the_variable_is_none_of_ours() -> None:
    """In the value of another variable, or as the end of another name."""
    with (
        program(None, A=f"{VARIABLE}=s") as quoting,
        program(None, **{f"X{VARIABLE}": "s"}) as alike,
        program("") as empty,
    ):
        assert find_families({"s": 0}) == []
        assert {quoting.poll(), alike.poll(), empty.poll()} == {None}


def test_this_process_is_left_out() -> None:
    """A template ends everybody else."""
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from marserve.lineage import end_families, find_families\n"
        "print(find_families({'s': 0}), end_families({'s': 0}))"
    )

    told = subprocess.run(
        [sys.executable, "-c", script, *sys.path], env={VARIABLE: "s/t"}, capture_output=True, check=True, text=True
    )

    assert told.stdout.strip() == "[] []"


def test_a_fork_without_a_new_program_is_told_by_its_page() -> None:
    """Its environment is still that of who was forked; the page that it has mapped is its worker's alone."""
    script = (
        "import os, sys; sys.path[:0] = sys.argv[3:]\n"
        "from marserve.shared_page import Page\n"
        "page = Page(int(sys.argv[1])); os.close(int(sys.argv[1]))\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    descriptors = [create_page(), create_page()]
    inodes = [os.fstat(descriptor).st_ino for descriptor in descriptors]
    ours = Page(descriptors[0])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(descriptor), "", *sys.path],
            env={VARIABLE: "s/t"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
        )
        for descriptor in descriptors
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"

        assert find_families({"s/t/w": 0}) == []
        assert end_families({"s/t/w": inodes[0]}) == [processes[0].pid]
        assert processes[1].poll() is None
    finally:
        ours.close()
        for process, descriptor in zip(processes, descriptors, strict=True):
            os.close(descriptor)
            process.kill()
            process.communicate()


def test_a_family_is_all_that_was_started_with_what_it_used() -> None:
    """Children of children too; what a child used that has ended is its parent's."""
    inner = [sys.executable, "-c", "import time; time.sleep(60)"]
    outer = f"import subprocess, time; subprocess.Popen({inner!r}).wait()"
    with subprocess.Popen([sys.executable, "-c", outer]) as child:
        try:
            until = time.monotonic() + 10
            while len(found := family(child.pid)) < 2 and time.monotonic() < until:
                time.sleep(0.02)
        finally:
            for each in psutil.Process(child.pid).children(recursive=True):
                each.kill()
            child.kill()

    assert len(found) == 2
    assert all(seconds >= 0 for seconds in found.values())
    assert os.getpid() not in found
    assert child.pid in family(os.getpid()) or not psutil.pid_exists(child.pid)


_LEAVES = """
import subprocess
from marserve.lineage import adopt_orphans, end_family, family
import os
adopt_orphans()
shell = "env -i setsid sleep 600 & exit 0"
subprocess.run(["sh", "-c", shell], check=True)
before = len(family(os.getpid()))
end_family()
print(before, len(family(os.getpid())))
"""


def test_what_left_its_session_without_an_environment_ends_with_its_family() -> None:
    """No lineage names it, and its parent has ended."""
    ran = subprocess.run([sys.executable, "-c", _LEAVES], capture_output=True, text=True, timeout=60, check=True)

    assert ran.stdout.split() == ["2", "1"]
