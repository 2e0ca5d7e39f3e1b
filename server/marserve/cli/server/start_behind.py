"""Starts a server in the background, and waits until its models are loaded or one of them cannot be.

It knows the server's APIs and its console log; `start.py` reads the flags.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from marserve.cli.output import CommandFailed, Interrupted, Output, Step
from marserve.cli.progress.wait_progress import LOOK_EVERY_S, Lines
from marserve.cli.remote import Inference, Management, find_address
from marserve.cli.server.background import start_server
from marserve.cli.server.pid_file import MARSERVE_WORD, AlreadyRunning, PidFile
from marserve.cli.server.start_block import (
    Started,
    block,
    coloured,
    device_line,
    device_of_workers,
    listening_at,
    name_of,
    plain,
)
from marserve.cli.versions import Description, has_failed, is_ready, label, last_death, progress_of
from marserve.errors import BadSettings, without_stop
from marserve.machine.describe import count_cores
from marserve.settings import Settings, apis_by_address
from marserve.settings.report import sources_report

CONSOLE_LOG = "console.log"
"""Standard error of a server in the background, a file in its log folder. It is empty unless the server breaks."""

SERVER_LOG = "ts_log.log"
# While a server looks for devices it answers only probes (`app/early_probes.py`), with this status. Then it closes
# those listeners and opens its own. Meanwhile it may be alive and fail to answer, at most so many times in a row.
NOT_READY, MOST_MISSED = 503, 10


def start_behind(
    settings: Settings,
    arguments: Sequence[str],
    pid_file: PidFile,
    timeout_s: float,
    output: Output,
    *,
    is_verbose: bool = False,
) -> None:
    """Start the server as a process of its own, and wait until its models are loaded or one of them cannot be.

    `arguments` are those of a `marserve start` with these settings. With `is_verbose` it says what is set where.
    Raises AlreadyRunning, BadSettings, CommandFailed and, if the wait is interrupted, Interrupted.
    """
    running = pid_file.running_pid()
    if running is not None:
        raise AlreadyRunning(running)
    with (
        Inference(str(settings.inference_address), settings=settings) as front,
        Management(str(settings.management_address), settings=settings) as back,
    ):
        if front.is_alive():
            raise CommandFailed(
                f"Another server answers at {front.address} already.",
                "Stop it, or start this one with another --inference-address.",
            )
        # No process reads its standard output, so it writes log files even if a server in the foreground would not.
        logs = settings.log_location or settings.working_directory / "logs"
        warnings = [*settings.warnings, *settings.notes]
        for warning in warnings:
            output.note(f"Warning: {warning}")
        sources = sources_report(settings)
        for line in sources if is_verbose else ():
            output.note(line)
        stopping = command_for("stop", back.address)
        began = time.time()
        process = _spawn(arguments, logs)
        # Written here too, so that `marserve stop` finds the server if this wait is interrupted. If that fails, the
        # server itself says why and ends.
        with contextlib.suppress(AlreadyRunning, BadSettings):
            pid_file.claim(process.pid)
        try:
            seconds: dict[str, float] = {}
            until = time.monotonic() + timeout_s
            versions = _wait_until_settled(process, front, back, until, output, logs, began, seconds)
        except KeyboardInterrupt:
            raise Interrupted(
                f"The server goes on as process {process.pid}; {stopping} ends it.", pid=process.pid
            ) from None
        finally:
            if process.poll() is not None:
                pid_file.release(process.pid)
        failures = [
            f"{label(version)} did not load ({last_death(version) or 'no worker is left'})"
            for version in versions
            if not is_ready(version)
        ]
        failures += front.startup().reasons
        document = {
            "pid": process.pid,
            "inference": front.address,
            "management": back.address,
            "ready": not failures,
            "reasons": failures,
            "warnings": warnings,
            "sources": sources,
            "models": versions,
        }
        if failures:
            what = (
                f"{without_stop(failures[0])}."
                if len(failures) == 1
                else "\n".join([f"{len(failures)} failed:", *_indent(failures)])
            )
            raise CommandFailed(
                f"The server runs as process {process.pid}, but {what}",
                f"More stands in {logs / SERVER_LOG}. {stopping} ends the server.",
                **document,
            )
        output.lines(
            document,
            block(
                Started(
                    listening_at([(names, str(address)) for address, names in apis_by_address(settings)], []),
                    versions,
                    front.address,
                    device_line(device_of_workers(versions), count_cores(), versions),
                    seconds=seconds,
                    ending=f"Process {process.pid}; logs are in {logs}. {stopping} ends the server.",
                ),
                coloured if output.has_colours else plain,
            ),
        )


def command_for(word: str, management: str) -> str:
    """A command for the server with this management address: `marserve stop`, with its address where it needs one.

    It needs none where the settings of this folder name the address.
    """
    try:
        is_found = find_address("management", None, None) == management
    except BadSettings:
        is_found = False
    return f"`marserve {word}`" if is_found else f"`marserve {word} --management {management}`"


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _spawn(arguments: Sequence[str], logs: Path) -> subprocess.Popen[bytes]:
    """The server's process. The console log gets what it prints before its logs are open, and Python's last words."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        console = (logs / CONSOLE_LOG).open("wb")
    except OSError as error:
        raise BadSettings(
            f"log_location is {str(logs)!r}, which cannot be written ({error.strerror}); name another folder",
            key="log_location",
        ) from error
    with console:
        return start_server(
            "marserve.cli",
            ["start", "--foreground", *arguments, "--set", f"log_location={logs}"],
            MARSERVE_WORD,
            stdout=subprocess.DEVNULL,
            stderr=console,
        )


def _wait_until_settled(
    process: subprocess.Popen[bytes],
    front: Inference,
    back: Management,
    deadline: float,
    output: Output,
    logs: Path,
    began: float,
    seconds: dict[str, float],
) -> list[Description]:
    """Wait until each version has loaded or failed; returns the versions as they then are. `deadline` is monotonic.

    `began` is when the process was started, in seconds since the epoch; `seconds` gets how long each version took, by
    `name_of`. Raises CommandFailed if the server ends, or if
    the time is up; then it goes on loading.
    """
    with output.progress() as progress:
        lines = Lines(progress)
        lines.show([Step("Starting the server")])
        missed = 0
        while _still_runs(process):
            if front.is_alive():
                try:
                    startup, versions = front.startup(), back.describe_all()
                except CommandFailed as failure:
                    missed = _missed(failure, missed)
                else:
                    missed = 0
                    for version in versions:
                        if is_ready(version):
                            seconds.setdefault(name_of(version), time.time() - began)
                    lines.show([progress_of(version) for version in versions] or [Step("Reading the models")])
                    if startup.is_well and all(is_ready(version) or has_failed(version) for version in versions):
                        return versions
            if time.monotonic() >= deadline:
                raise CommandFailed(
                    f"The server runs as process {process.pid}, but its models are not loaded yet.",
                    f"It goes on loading: {command_for('status', back.address)} tells how far it is, "
                    f"{command_for('stop', back.address)} ends it.",
                    pid=process.pid,
                )
    words = (logs / CONSOLE_LOG).read_text("utf-8", "replace").strip().splitlines()
    raise CommandFailed(
        words[-1].removeprefix("marserve: ").replace("marserve did not", "The server did not", 1)
        if words
        else f"The server ended with status {process.returncode}.",
        f"More stands in {_log_of_end(logs, began)}; `marserve start --foreground` shows it here.",
        exit_status=process.returncode,
    )


def _missed(failure: CommandFailed, missed: int) -> int:
    """How often in a row there was no answer. Raises the failure unless the server may not listen yet."""
    code = failure.detail.get("code")
    if code == NOT_READY:
        return 0
    if code is not None or missed >= MOST_MISSED:
        raise failure
    return missed + 1


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process still runs after `LOOK_EVERY_S`."""
    try:
        process.wait(timeout=LOOK_EVERY_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _log_of_end(logs: Path, began: float) -> Path:
    """The log that says why a server ended: its own, or the console log if it ended before its own was open."""
    own = logs / SERVER_LOG
    try:
        return own if own.stat().st_mtime >= began - 1 else logs / CONSOLE_LOG
    except OSError:
        return logs / CONSOLE_LOG
