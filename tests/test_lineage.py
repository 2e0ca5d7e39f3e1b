"""Tests for telling whose child a process is, though it has left its parent's group."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from marserve.lineage import VARIABLE, end_families, find_families
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
