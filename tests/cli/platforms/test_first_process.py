"""The minimal init, with real processes: signals and status pass, orphans are reaped, containers end with servers."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from support.processes import descendants, living
from support.server import poll

INIT = """
import os, sys
from marserve.cli.platforms.first_process import CannotRun, look_after
try:
    sys.exit(look_after(sys.argv[1:], os.environ))
except CannotRun as error:
    print(error)
    sys.exit(error.status)
"""
SERVER = """
import setproctitle, signal, sys
setproctitle.setproctitle("marserve.server")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("serving", flush=True)
while True:
    signal.pause()
"""
# As `torchserve --start` leaves its server: in a session of its own, with the word in its command line.
LEAVE_SERVER = f"""
import subprocess, sys
server = subprocess.Popen([sys.executable, "-X", "marserve.server", "-c", {SERVER!r}], start_new_session=True,
                          stdout=subprocess.PIPE)
server.stdout.readline()
"""


class Container:
    """The init with a command below it, as a container has them."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", INIT, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        self.seen: set[int] = set()

    def line(self) -> str:
        """The next line that something in it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def wait(self) -> int:
        """Its status, when it has ended and taken everything along."""
        status = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@pytest.fixture
def started() -> Iterator[list[Container]]:
    """Containers that end with the test."""
    containers: list[Container] = []
    yield containers
    for container in containers:
        left = descendants(container.process.pid) if container.process.poll() is None else set()
        for pid in left:
            psutil.Process(pid).kill()
        container.process.kill()
        container.process.wait(10)


def python(source: str) -> tuple[str, ...]:
    """A command that runs this."""
    return sys.executable, "-c", source


@pytest.mark.parametrize("status", [0, 3])
def test_the_status_of_the_command_is_the_containers(started: list[Container], status: int) -> None:
    """Whatever it is."""
    started.append(Container(*python(f"raise SystemExit({status})")))

    assert started[0].wait() == status


def test_a_command_that_a_signal_killed_ends_as_shells_tell_it(started: list[Container]) -> None:
    """128 and the signal's number: an init that died of the signal itself would tell a container's engine less."""
    started.append(Container(*python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")))

    assert started[0].wait() == 128 + signal.SIGKILL


def test_a_command_that_is_not_there_is_named(started: list[Container]) -> None:
    """With the status that a shell has for it."""
    started.append(Container("no-such-program"))

    assert started[0].line() == "'no-such-program' cannot be run (No such file or directory)"
    assert started[0].wait() == 127


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command(started: list[Container], number: signal.Signals) -> None:
    """It ends as it sees fit, and no earlier does the container."""
    source = f"""
import signal, sys
signal.signal({int(number)}, lambda *_: sys.exit(7))
print("ready", flush=True)
while True:
    signal.pause()
"""
    started.append(Container(*python(source)))
    assert started[0].line() == "ready"

    started[0].process.send_signal(number)

    assert started[0].wait() == 7


def test_the_command_finds_the_signals_as_they_were(started: list[Container]) -> None:
    """What the init blocks for itself is not inherited."""
    started.append(Container(*python("import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))")))

    assert started[0].line() == "set()"
    assert started[0].wait() == 0


def test_orphans_are_reaped(started: list[Container]) -> None:
    """A grandchild whose parent has gone is left to the init; no zombie stays while the command runs."""
    source = """
import os, sys
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os._exit(9)
    os._exit(0)
os.wait()
import signal
signal.pause()
"""
    started.append(Container(*python(source)))
    orphan = int(started[0].line())

    for _ in poll(10, "the orphan is reaped"):
        if not living([orphan]):
            break

    assert started[0].process.poll() is None
    started[0].process.terminate()
    assert started[0].wait() == 128 + signal.SIGTERM


def test_a_server_that_the_command_left_keeps_the_container_and_gets_its_signals(started: list[Container]) -> None:
    """A script whose last word is `torchserve --start` is answered by a container that serves."""
    started.append(Container(*python(LEAVE_SERVER)))
    container = started[0]
    server = find_server(container)
    for _ in poll(10, "the command has ended and left its server"):
        if server.ppid() == container.process.pid:
            break
    with pytest.raises(subprocess.TimeoutExpired):
        container.process.wait(0.3)

    container.process.send_signal(signal.SIGTERM)

    assert container.wait() == 5
    assert not living([server.pid])


def test_a_container_ends_with_its_server_though_something_waits_beside_it(started: list[Container]) -> None:
    """`torchserve --start; tail -f /dev/null` slept for ever after the server's death."""
    line = f'"{sys.executable}" -c "$0"; exec tail -f /dev/null'
    started.append(Container("sh", "-c", line, LEAVE_SERVER))
    container = started[0]
    server = find_server(container)
    for _ in poll(10, "the server was left to the init"):
        if server.ppid() == container.process.pid:
            break
    left = descendants(container.process.pid)

    server.kill()

    assert container.wait() == 128 + signal.SIGKILL
    assert not living(left)


def test_a_server_is_given_its_time_and_its_status_counts(started: list[Container]) -> None:
    """What waits beside it dies of the signal at once; the container ends when the server has, and as that did."""
    line = f'"{sys.executable}" -c "$0"; exec tail -f /dev/null'
    started.append(Container("sh", "-c", line, LEAVE_SERVER))
    container = started[0]
    server = find_server(container)
    for _ in poll(10, "the server was left to the init"):
        if server.ppid() == container.process.pid:
            break

    container.process.send_signal(signal.SIGTERM)

    assert container.wait() == 5


def test_ctrl_c_on_a_terminal_reaches_the_command_once() -> None:
    """A second SIGINT would hurry a server that was asked to stop in order."""
    source = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # one that comes at once waits as well
print("ready", flush=True)
signal.sigwait({signal.SIGINT})
print("seen once" if signal.sigtimedwait({signal.SIGINT}, 0.3) is None else "seen twice", flush=True)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", INIT, *python(source)])
    try:
        said = b""
        while b"ready" not in said:
            said += os.read(terminal, 1024)
        os.write(terminal, b"\x03")
        while b"seen once" not in said:
            assert b"seen twice" not in said
            said += os.read(terminal, 1024)
    finally:
        os.close(terminal)  # hangs up whatever is still there
        os.waitpid(pid, 0)


def find_server(container: Container) -> psutil.Process:
    """The process in the container that shows a server's word."""
    for _ in poll(10, "the server is there"):
        for child in psutil.Process(container.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "marserve.server" in child.cmdline():
                    return child
    raise AssertionError
