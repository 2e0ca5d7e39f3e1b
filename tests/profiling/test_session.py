"""A profile is made, its traces are read by a process of its own, and the last ones are kept."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from marserve.errors import CannotProfile, ProfileUnknown
from marserve.messages import Profiled, ProfiledBatch
from marserve.pool.checks.profiles import ProfileWish, TakenProfile
from marserve.profiling import py_spy, session
from marserve.profiling.py_spy import PySpy
from marserve.profiling.session import MOST_KEPT, Profiles
from marserve.registry.models import Registry
from support.profiles import a_profile

pytestmark = pytest.mark.anyio

WISH = ProfileWish(50, 5.0, 1 << 20)
TRACE = gzip.compress(
    json.dumps(
        {
            "traceEvents": [
                {"ph": "X", "cat": "user_annotation", "name": "marserve batch 1: a", "tid": 1, "ts": 0, "dur": 9e4},
                {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 0, "dur": 6e4},
            ]
        }
    ).encode()
)
BATCH = ProfiledBatch(1, 1, 1.0, 0.0, 0.1, 0.0, 0.08, 0.0, 0.0)


class FakeRegistry:
    """A version whose worker has measured this already."""

    def __init__(self, *traces: bytes, reason: str = "") -> None:
        profiled = Profiled(1, 1.0, 1.2, [BATCH], [0] * len(traces), 1, 1, 1, True, 0.0, reason)
        self.taken = TakenProfile("W-9000-m_1.0", profiled, traces, [("W-9000-m_1.0", 1, 0.1)])

    async def profile(
        self, model: str, version: str | None, wish: ProfileWish, begun: Callable[[list[int]], None]
    ) -> tuple[str, TakenProfile]:
        """It is there at once."""
        begun([os.getpid()])
        return version or "1.0", self.taken

    def profile_progress(self, model: str, version: str | None) -> tuple[str, tuple[float, int] | None]:
        """None is being made."""
        return version or "1.0", None


@pytest.fixture(autouse=True)
def without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program looks into the test's process."""
    monkeypatch.setattr(py_spy, "find_program", lambda: None)


def profiles_of(registry: Any) -> Profiles:
    """The profiles of a server with this registry."""
    return Profiles(cast("Registry", registry))


async def test_a_profile_is_read_by_a_process_of_its_own_and_kept_with_its_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two traces of a worker are one file."""
    profiles = profiles_of(FakeRegistry(TRACE, TRACE))

    made = await profiles.make("m", None, WISH)

    assert [(each.name, each.ms) for each in made.parts[:4]] == [
        ("operators", 60.0),
        ("python", 20.0),
        ("waiting", 0.0),
        ("blocked", 20.0),
    ]
    assert (made.modelName, made.modelVersion, made.worker, made.askedRequests) == ("m", "1.0", "W-9000-m_1.0", 50)
    assert made.noPython is not None
    assert "pip install py-spy" in made.noPython
    assert made.workers is not None
    assert made.workers[0].meanMs == 100
    assert profiles.state("m", None).last is made
    assert len(json.loads(gzip.decompress(profiles.trace("m", "1.0")))["traceEvents"]) == 4


async def test_the_state_says_for_how_long_a_trace_is_being_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile is still being made then; of a measuring worker it says how far that is."""
    profiles = profiles_of(FakeRegistry(TRACE))
    seen: list[Any] = []

    async def analysed(measured: Any) -> Any:
        seen.append(profiles.state("m", None))
        return session.Analysed(a_profile(pythonStacks=None), b"")

    monkeypatch.setattr(session, "_analyse", analysed)
    await profiles.make("m", None, WISH)

    assert (seen[0].isRunning, seen[0].seconds, seen[0].requests) == (True, 0.2, 1)
    assert 0 <= seen[0].readingSeconds < 10
    assert (profiles.state("m", None).isRunning, profiles.state("m", None).readingSeconds) == (False, None)


async def test_there_is_no_trace_without_a_profile_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal says what is missing."""
    profiles = profiles_of(FakeRegistry(reason="this model does not use torch"))
    with pytest.raises(ProfileUnknown, match=r"Version 1\.0 of m has no profile that is kept.*marserve profile m"):
        profiles.trace("m", None)

    async def analysed(measured: Any) -> Any:
        return session.Analysed(a_profile(pythonStacks=None), b"")

    monkeypatch.setattr(session, "_analyse", analysed)
    for number in range(MOST_KEPT + 1):
        await profiles.make("m", str(number), WISH)

    assert profiles.state("m", "0").last is None
    assert profiles.state("m", "1").last is not None
    with pytest.raises(ProfileUnknown, match="has no trace: none was recorded"):
        profiles.trace("m", "1")


async def test_what_cannot_be_read_at_all_is_said_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process that reads has failed."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho MemoryError >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(session.sys, "executable", str(program))
    profiles = profiles_of(FakeRegistry(TRACE))

    with pytest.raises(CannotProfile, match=r"cannot be read: MemoryError\. Record less"):
        await profiles.make("m", None, WISH)

    assert profiles.state("m", None).last is None


def _program(folder: Path, script: str) -> str:
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


_OUTPUT = 'for last; do :; done\ntrap \'echo "main;f 12" > "$last"; exit 0\' INT\n'


async def test_py_spy_is_stopped_with_the_profile_and_its_stacks_are_read(tmp_path: Path) -> None:
    """It writes when it is interrupted."""
    ready = tmp_path / "ready"
    spy = PySpy(_program(tmp_path, f"{_OUTPUT}touch {ready}\nwhile :; do sleep 0.01; done"))
    await spy.begin(os.getpid(), 60)
    while not ready.exists():
        await asyncio.sleep(0.01)

    assert await spy.end() == ("main;f 12\n", "")

    await spy.close()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "Error: Permission Denied: Try running with sudo" >&2', "CAP_SYS_PTRACE"),
        ('echo "Error: no such process" >&2', "py-spy saw nothing: Error: no such process"),
        ("true", "the worker was idle"),
    ],
)
async def test_where_py_spy_sees_nothing_the_reason_is_said(tmp_path: Path, script: str, said: str) -> None:
    """Its own words, or what has it attach."""
    has_said = tmp_path / "said"
    spy = PySpy(_program(tmp_path, f"{script}; touch {has_said}; exit 1"))
    await spy.begin(os.getpid(), 1)
    while not has_said.exists():  # an interrupt would end it sooner
        await asyncio.sleep(0.01)
    stacks, reason = await spy.end()
    await spy.close()

    assert stacks == ""
    assert said in reason


async def test_a_py_spy_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that cannot be started is said to."""
    monkeypatch.setattr(py_spy, "ENDS_WITHIN_S", 0.05)
    ready = tmp_path / "ready"
    spy = PySpy(_program(tmp_path, f"trap '' INT\ntouch {ready}\nwhile :; do sleep 0.05; done"))
    await spy.begin(os.getpid(), 60)
    while not ready.exists():
        await asyncio.sleep(0.01)

    assert await spy.end() == ("", "py-spy did not end within 0.05 s")
    await spy.close()

    missing = PySpy(str(tmp_path / "none"))
    await missing.begin(os.getpid(), 1)
    assert "cannot be started: No such file" in (await missing.end())[1]
    await missing.close()
