"""What a worker sets of its own process, and its status at the end."""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.worker.process.own_process import exit_status, leave, stay_on, use_threads


@pytest.mark.parametrize(
    ("code", "status"), [(None, 0), (0, 0), (3, 3), (True, 1), ("words", 1), (-1, 255), (256, 0), (2**70, 0)]
)
def test_an_exits_status_is_what_a_shell_would_see(code: Any, status: int) -> None:
    """Python's rules, and the system's eight bits."""
    assert exit_status(SystemExit(code)) == status


@pytest.mark.parametrize(("threads", "expected"), [(3, "3"), (0, "2")])
def test_numeric_libraries_are_told_how_many_threads_they_have(
    monkeypatch: pytest.MonkeyPatch, threads: int, expected: str
) -> None:
    """None is as many as there are processors that this process may use; torch is told where it was imported."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    for name in names:
        monkeypatch.setenv(name, "before")
    told: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=told.append))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)

    use_threads(threads)

    assert [os.environ[name] for name in names] == [expected] * 3
    assert told == [int(expected)]
    monkeypatch.delitem(sys.modules, "torch")
    use_threads(threads)


@pytest.mark.parametrize(("processors", "expected"), [(3, "3"), (None, "1")])
def test_a_system_that_gives_processes_no_processors_of_their_own_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, processors: int | None, expected: str
) -> None:
    """macOS: there as many threads are used as there are processors, one where the system does not say."""
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "before")
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    stay_on([1, 2])
    use_threads(0)

    assert os.environ["OMP_NUM_THREADS"] == expected


def test_a_worker_stays_on_its_processors_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None is all of them; one that was taken away meanwhile ends nothing."""
    asked: list[tuple[int, object]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append((pid, cpus)))
    stay_on([])
    assert asked == []
    stay_on([1, 2])
    assert asked == [(0, [1, 2])]

    def refuse(pid: int, cpus: object) -> None:
        raise OSError("no such processor")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with caplog.at_level(logging.WARNING):
        stay_on([9])
    assert "no such processor" in caplog.text


@pytest.mark.parametrize("error", [OSError("closed"), ValueError("closed")])
def test_a_worker_ends_though_its_output_cannot_be_flushed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Both streams are tried; an author may have closed either."""
    ended: list[int] = []
    flushed: list[str] = []

    def flush(name: str) -> None:
        flushed.append(name)
        raise error

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, SimpleNamespace(flush=lambda name=name: flush(name)))
    monkeypatch.setattr(os, "_exit", ended.append)

    leave(3)

    assert (flushed, ended) == (["stdout", "stderr"], [3])
