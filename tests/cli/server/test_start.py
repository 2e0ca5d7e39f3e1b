"""`marserve start` and `marserve stop` with real servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from marserve.cli.server import start as start_command
from marserve.cli.server.pid_file import PidFile
from marserve.machine.start_watch import StartWatch
from marserve.settings import load_settings
from support.command_line import marserve
from support.prepared import Prepared
from support.server import free_ports, poll
from support.workplace import BROKEN, Workplace


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workplace]:
    """A folder to start servers in."""
    with Workplace(tmp_path) as place:
        yield place


def test_a_server_starts_behind_the_command_and_stops_on_demand(place: Workplace) -> None:
    """`start` ends when the model answers, `stop` when the process is gone; nothing is left of it."""
    place.is_prepared = False  # as users type it
    place.add_echo()

    started = place.marserve("start", "--models", "echo.mar", "--json")

    assert started.returncode == 0, started.stderr
    document = json.loads(started.stdout)
    assert document["ready"] is True
    assert document["models"][0]["modelName"] == "echo"
    assert place.server_pids() == [document["pid"]]
    assert len(place.pid_files()) == 1
    assert httpx.post(f"{place.inference}/predictions/echo", content=b"hello").content == b"hello"

    assert place.marserve("status").returncode == 0
    stopped = place.marserve("stop", "--json")

    assert json.loads(stopped.stdout) == {"stopped": True, "pid": document["pid"], "killed": False}
    assert place.server_pids() == []
    assert place.pid_files() == []
    assert place.marserve("status").returncode == 1


@pytest.mark.long
def test_a_start_waits_while_a_vendors_tool_takes_its_time(place: Workplace, tmp_path: Path) -> None:
    """The server answers probes meanwhile, and nothing else."""
    place.add_echo()
    tool = tmp_path / "tools" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nsleep 2.5\n")
    tool.chmod(0o755)

    started = place.marserve("start", "--models", "echo.mar", PATH=f"{tool.parent}{os.pathsep}{os.environ['PATH']}")

    assert started.returncode == 0, started.stderr
    assert httpx.post(f"{place.inference}/predictions/echo", content=b"hello").content == b"hello"
    place.marserve("stop")


@pytest.mark.system
def test_every_command_finds_the_server_of_its_folder(place: Workplace) -> None:
    """Addresses come from the same settings; no flag is needed."""
    place.add_echo()
    place.add_echo("second")
    (place.folder / "body.bin").write_bytes(b"hello")
    assert place.marserve("start", "--models", "first=echo.mar").returncode == 0

    assert place.marserve("register", "second.mar").returncode == 0
    assert place.marserve("scale", "second", 2).returncode == 0
    assert place.marserve("infer", "second", "body.bin").stdout == "hello"
    listed = json.loads(place.marserve("models", "--json").stdout)
    again = place.marserve("start")
    stopped = place.marserve("stop")

    assert [(version["modelName"], len(version["workers"])) for version in listed] == [("first", 1), ("second", 2)]
    assert again.returncode == 1
    assert "runs already" in again.stderr
    assert stopped.returncode == 0


def test_a_model_that_cannot_load_fails_the_start_with_its_reason(place: Workplace) -> None:
    """The server runs all the same, with its other models."""
    place.add_echo()
    place.add_echo("broken", handler=BROKEN)

    started = place.marserve("start", "--models", "echo.mar", "--models", "broken.mar", "--json")

    error = json.loads(started.stdout)["error"]
    assert started.returncode == 1
    assert "broken/1.0" in error["message"]
    assert "the weights are torn" in error["message"]
    assert httpx.post(f"{place.inference}/predictions/echo", content=b"hello").content == b"hello"
    assert place.marserve("stop").returncode == 0


def test_a_missing_archive_fails_the_start_with_its_name(place: Workplace) -> None:
    """A script must not take such a server for complete."""
    started = place.marserve("start", "--models", "nothing.mar")

    assert started.returncode == 1
    assert "nothing.mar" in started.stderr
    assert place.marserve("stop").returncode == 0


def test_a_taken_port_is_said_and_nothing_is_left(place: Workplace) -> None:
    """The server's own words are repeated by the command that started it."""
    port = int(place.management.rsplit(":", 1)[1])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        started = place.marserve("start")

    assert started.returncode == 1
    assert "Failed to bind to address" in started.stderr
    assert "Traceback" not in started.stderr
    assert place.server_pids() == []
    assert place.pid_files() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "job_queue_size=many"], "job_queue_size"),
        (["--set", "no_such_key=1"], "no_such_key"),
        (["--set", "nothing"], "KEY=VALUE"),
        (["--config", "gone.properties"], "gone.properties"),
        (["--model-store", "gone"], "gone"),
        (["--inference-address", "nowhere"], "nowhere"),
    ],
)
@pytest.mark.parametrize("where", [[], ["--foreground"]])
def test_wrong_settings_are_status_2(
    words: list[str], said: str, where: list[str], place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is started; the sentence names what was wrong."""
    monkeypatch.chdir(place.folder)

    ran = marserve("start", *where, *words)

    assert ran.status == 2
    assert said in ran.err
    assert not (place.folder / "logs").exists()


def test_a_server_in_front_ends_with_its_signal_and_status_0(place: Workplace) -> None:
    """As a service manager runs it: SIGTERM drains, and the PID file is gone afterwards."""
    place.add_echo()
    environment = os.environ | {"TMPDIR": str(place.temporary), "TEMP": str(place.temporary)}
    command = [sys.executable, "-m", "marserve.cli", "start", "--foreground", "--models", "echo.mar"]
    with Prepared(command, cwd=place.folder, env=environment, stdout=subprocess.DEVNULL) as process:
        for _ in poll(30, "the server is ready"):
            if marserve("status", "--inference", place.inference, "--management", place.management).status == 0:
                break
        assert place.server_pids() == [process.pid]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0

    assert place.pid_files() == []


def test_stop_without_a_server_is_fine(place: Workplace) -> None:
    """What was to be is so."""
    stopped = place.marserve("stop", "--json")

    assert stopped.returncode == 0
    assert json.loads(stopped.stdout) == {"stopped": False, "pid": None}


@pytest.mark.system
def test_a_server_that_somebody_else_started_is_not_stopped(place: Workplace) -> None:
    """Another temporary folder, another container: its process is not known here."""
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir()
    assert place.marserve("start", TMPDIR=str(elsewhere)).returncode == 0

    refused = place.marserve("stop")
    stopped = place.marserve("stop", TMPDIR=str(elsewhere))

    assert refused.returncode == 1
    assert "Stop it where it was started" in refused.stderr
    assert stopped.returncode == 0


def test_a_server_that_does_not_end_can_be_killed(place: Workplace) -> None:
    """Only when that was asked for."""
    assert place.marserve("start").returncode == 0
    (pid,) = place.server_pids()
    os.kill(pid, signal.SIGSTOP)

    patient = place.marserve("stop", "--timeout", 0.2)
    killed = place.marserve("stop", "--timeout", 0.2, "--kill", "--json")

    assert patient.returncode == 1
    assert "--kill" in patient.stderr
    assert json.loads(killed.stdout)["killed"] is True
    assert place.server_pids() == []
    for folder in place.temporary.glob("marserve-*"):
        shutil.rmtree(folder)


def test_a_wait_that_takes_too_long_leaves_the_server_running(place: Workplace) -> None:
    """It goes on loading; the command says how to look. `stop` finds it at once, however far its start is."""
    place.add_echo("slow", handler="import time\ntime.sleep(5)\n")

    started = place.marserve("start", "--models", "slow.mar", "--timeout", 0)
    running = place.server_pids()
    stopped = place.marserve("stop", "--json")

    assert started.returncode == 1
    assert "not loaded yet" in started.stderr
    assert len(running) == 1
    assert json.loads(stopped.stdout) == {"stopped": True, "pid": running[0], "killed": False}
    assert place.pid_files() == []


def test_what_is_odd_about_the_settings_is_said_by_the_command(place: Workplace) -> None:
    """And not in the log alone; several archives that fail have a line each."""
    place.configure(job_queue_siz="3")
    place.add_echo("broken", handler=BROKEN)

    started = place.marserve("start", "--models", "broken.mar", "--models", "gone.mar", MARSERVE_JOB_QUEUE_SIZ="3")
    stopped = place.marserve("stop")

    assert "Warning: job_queue_siz is no key that is known" in started.stderr
    assert "did you mean MARSERVE_JOB_QUEUE_SIZE?" in started.stderr
    assert [line for line in started.stderr.splitlines() if line.startswith("  broken/1.0")]
    assert [line for line in started.stderr.splitlines() if line.startswith("  ") and "gone.mar" in line]
    assert stopped.returncode == 0


@pytest.mark.system
def test_a_start_that_is_not_waited_for_goes_on(place: Workplace) -> None:
    """Ctrl-C ends the command, and it says which process goes on."""
    place.add_echo("slow", handler="import time\ntime.sleep(60)\n")
    environment = os.environ | {"TMPDIR": str(place.temporary), "TEMP": str(place.temporary)}
    command = [sys.executable, "-m", "marserve.cli", "start", "--models", "slow.mar"]
    with (place.folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=place.folder, env=environment, stderr=said)
    for _ in poll(30, "the server listens"):
        if marserve("models", "--management", place.management).status == 0:
            break
    process.send_signal(signal.SIGINT)

    assert process.wait(30) == 130
    (pid,) = place.server_pids()
    assert f"The server goes on as process {pid}; `marserve stop` ends it." in (place.folder / "said").read_text()
    assert place.marserve("stop").returncode == 0


@pytest.mark.parametrize(
    ("out", "err", "verbose", "expected"),
    [
        ("terminal", "terminal", False, "coloured"),
        ("pipe", "terminal", False, "plain"),
        ("terminal", "pipe", False, "coloured"),
        ("pipe", "pipe", False, "logs"),
        ("terminal", "terminal", True, "logs"),
    ],
)
def test_who_looks_on_gets_the_block_and_others_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, err: str, verbose: bool, expected: str
) -> None:
    """`| tee file` leaves a terminal; a container's log is none."""
    seen: list[Any] = []
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def serve(*arguments: Any) -> int:
        seen.append(arguments[3:])
        return 0

    monkeypatch.setattr(start_command, "serve", serve)
    settings = load_settings("marserve", {}, {}, tmp_path, reads_file=False)
    (read, write), terminal = os.pipe(), os.openpty()
    with contextlib.ExitStack() as opened:
        for descriptor in (read, terminal[0]):
            opened.callback(os.close, descriptor)
        ends = {"pipe": opened.enter_context(os.fdopen(write, "w"))}
        ends["terminal"] = opened.enter_context(os.fdopen(terminal[1], "w"))
        monkeypatch.setattr(sys, "stdout", ends[out])
        monkeypatch.setattr(sys, "stderr", ends[err])
        start_command._serve_here(settings, cast("PidFile", None), cast("StartWatch", None), 0.0, verbose=verbose)
        monkeypatch.undo()

    [further] = seen
    assert (further[0]._paint.__name__ if further else "logs") == expected


def test_a_reader_of_the_block_that_goes_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`marserve start --foreground | head -1`: further lines go nowhere."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        start_command._show("one")
        start_command._show("two")
        monkeypatch.undo()


def test_the_block_names_every_listener_and_the_stop_that_works(place: Workplace) -> None:
    """Also those of addresses that are flags, which a plain `marserve stop` would not find."""
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"

    started = place.marserve("start", "--management-address", address)
    again = place.marserve("start", "--management-address", address)
    stopped = place.marserve("stop", "--management", address)

    assert (started.returncode, stopped.returncode) == (0, 0), started.stderr
    assert f"  Management   {address}\n  Metrics " in started.stdout
    assert re.search(r"marserve \S+   CPU, \d+ cores?, \d+ threads? a worker\n", started.stdout)
    assert f"`marserve stop --management {address}` ends the server." in started.stdout
    assert f"`marserve stop --management {address}`" in again.stderr
    assert "has stopped" in stopped.stdout
