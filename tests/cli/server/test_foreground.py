"""A server in this process: title, PID file, exit status."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve.cli.server.foreground import held_signals, serve
from marserve.cli.server.pid_file import AlreadyRunning, PidFile
from marserve.settings import Settings, load_settings
from support.bystander import bystander

WORD = "marserve.test.server"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Any settings: nothing is served with them here."""
    return load_settings("marserve", {}, {}, tmp_path)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """A server that has ended leaves its signals ignored; this process goes on, and wants its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles that the process would have been given."""
    given: list[str] = []
    monkeypatch.setattr("setproctitle.setproctitle", given.append)
    return given


@pytest.fixture
def running() -> Iterator[int]:
    """The process id of another server."""
    with bystander(WORD) as pid:
        yield pid


@pytest.mark.parametrize("status", [0, 1])
def test_the_servers_status_is_returned_and_its_file_is_there_while_it_runs(
    status: int, settings: Settings, titles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The title is exactly the word: SageMaker's toolkit compares whole arguments."""
    pid_file = PidFile(tmp_path / "server.pid", WORD)
    seen: list[tuple[int | None, list[str]]] = []

    def run(given: Settings, watch: object, companion: object) -> int:
        assert given is settings
        seen.append((pid_file.written_pid(), list(titles)))
        return status

    monkeypatch.setattr("marserve.app.server.run", run)

    assert serve(settings, pid_file) == status
    assert seen == [(os.getpid(), [WORD])]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # what comes now changes the status no more
    assert not pid_file.path.exists()


def test_a_server_that_breaks_takes_its_file_with_it(
    settings: Settings, titles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start need not remove an orphan."""
    pid_file = PidFile(tmp_path / "server.pid", WORD)

    def run(given: Settings, watch: object, companion: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("marserve.app.server.run", run)

    with pytest.raises(ZeroDivisionError):
        serve(settings, pid_file)
    assert not pid_file.path.exists()


def test_signals_that_were_blocked_reach_the_server(
    settings: Settings, titles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM never ended a server whose starter had blocked it; this process has its own mask again afterwards."""

    def run(given: Settings, watch: object, companion: object) -> int:
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("went on")

    monkeypatch.setattr("marserve.app.server.run", run)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    try:
        with pytest.raises(SystemExit) as ended:
            serve(settings, PidFile(tmp_path / "server.pid", WORD))
        after = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    assert ended.value.code == 0
    assert {signal.SIGTERM, signal.SIGUSR1} <= after


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_listens_ends_it_well(
    number: signal.Signals, settings: Settings, titles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that follows a start at once: 0, or 130 for Ctrl-C; no file; this process's own handlers are back."""
    pid_file = PidFile(tmp_path / "server.pid", WORD)
    before = signal.getsignal(number)

    def run(given: Settings, watch: object, companion: object) -> int:
        signal.raise_signal(number)
        raise AssertionError("went on")

    monkeypatch.setattr("marserve.app.server.run", run)

    with pytest.raises(SystemExit) as ended:
        serve(settings, pid_file)
    assert ended.value.code == (130 if number == signal.SIGINT else 0)
    assert signal.getsignal(number) == before
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_served_beside_a_running_server(
    settings: Settings, titles: list[str], running: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one keeps its file."""
    pid_file = PidFile(tmp_path / "server.pid", WORD)
    pid_file.claim(running)
    monkeypatch.setattr("marserve.app.server.run", lambda given, watch: pytest.fail("served"))

    with pytest.raises(AlreadyRunning):
        serve(settings, pid_file)

    assert pid_file.written_pid() == running


def test_a_signal_during_an_import_comes_when_that_is_done() -> None:
    """Inside, its exception might end as the failure of a module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = []

    def imported() -> None:
        with held_signals():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest of the import")

    with pytest.raises(KeyboardInterrupt):
        imported()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with held_signals():
        pass
