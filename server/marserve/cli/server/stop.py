"""`marserve stop`: has the server of this machine answer its accepted requests and end, and waits for its end."""

from __future__ import annotations

import os
import signal
from typing import Annotated, Any

import typer

from marserve.cli.dry_run import HEAD, as_dry
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, CommandFailed, Output
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address
from marserve.cli.server.pid_file import PidFile, marserve_pid_file
from marserve.errors import BadSettings

KILLED_WITHIN_S = 10.0


def stop(
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="How long to wait for its end, in s.")] = 60.0,
    kill: Annotated[bool, typer.Option("--kill", help="After the timeout kill it; requests may be lost.")] = False,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Stop the server: it takes no new requests, answers the accepted ones, ends its workers and exits."""
    with Output(as_json) as output:
        address = find_address("management", management, config)
        pid_file = marserve_pid_file(address)
        pid = pid_file.running_pid()
        if pid is None:
            _refuse_foreign(address)
            output.result({"stopped": False, "pid": None}, f"No server runs at {address}.")
            return
        if dry_run:
            _show_dry_run(output, address, pid, timeout, kill)
            return
        with output.progress() as progress:
            progress.add_task(f"Stopping process {pid}: accepted requests are answered first", total=None)
            was_killed = _end(pid, pid_file, timeout, kill)
        pid_file.release(pid)
        output.result(
            {"stopped": True, "pid": pid, "killed": was_killed},
            f"The server (process {pid}) {'was killed' if was_killed else 'has stopped'}.",
        )


def _show_dry_run(output: Output, address: str, pid: int, timeout_s: float, kill: bool) -> None:
    """Say which server would end, and how many requests it would answer first, if it reports that.

    Raises CommandFailed if it may not be stopped.
    """
    try:
        os.kill(pid, 0)
    except PermissionError as error:
        raise CommandFailed(f"Process {pid} belongs to another user.", "Stop it as that user.", pid=pid) from error
    load, now = _look(address)
    end = "it would be killed" if kill else "this command would give up"
    output.result(
        as_dry({"stopped": False, "pid": pid, **load}),
        HEAD,
        f"The server at {address} (process {pid}) would be asked to stop.",
        f"It would answer what it has accepted first: {now}. After {timeout_s:g} s {end}.",
    )


def _look(address: str) -> tuple[dict[str, Any], str]:
    """The requests that the server has to answer, for a script and for a person; or the reason why it does not tell."""
    try:
        with Management(address) as server:
            versions = server.describe_all()
    except (BadSettings, CommandFailed) as error:
        unknown = dict.fromkeys(("models", "pendingRequests", "runningRequests"))
        return {**unknown, "reason": error.message}, f"how much that is, it does not tell ({error.message.rstrip('.')})"
    waiting = sum(int(version["jobQueueStatus"]["pendingRequests"]) for version in versions)
    # A server of an earlier release does not report it.
    tells = all("runningRequests" in version for version in versions)
    running = sum(int(version["runningRequests"]) for version in versions) if tells else None
    answered = "" if running is None else f"{running} requests are being answered, "
    load = {"models": len(versions), "pendingRequests": waiting, "runningRequests": running}
    return load, f"of {len(versions)} versions of models {answered}{waiting} wait"


def _refuse_foreign(address: str) -> None:
    """Raise CommandFailed if a server answers there that this user's `marserve start` on this machine did not start."""
    with Management(address) as server:
        try:
            server.order("GET", "/models", {"limit": 1})
        except CommandFailed:
            return
    raise CommandFailed(
        f"A server answers at {address}, but no `marserve start` on this machine is known to have started it.",
        "Stop it where it was started: its service manager, its container, or `torchserve --stop`.",
    )


def _end(pid: int, pid_file: PidFile, timeout_s: float, kill: bool) -> bool:
    """Ask the process to end and wait for it; returns whether it had to be killed."""
    _signal(pid, signal.SIGTERM)
    if pid_file.wait_until_ended(pid, timeout_s):
        return False
    if not kill:
        raise CommandFailed(
            f"The server (process {pid}) still runs {timeout_s:g} s after it was asked to stop.",
            "It may be answering long requests. Wait with a longer --timeout, or end it with --kill.",
            pid=pid,
        )
    _signal(pid, signal.SIGKILL)
    if not pid_file.wait_until_ended(pid, KILLED_WITHIN_S):
        raise CommandFailed(f"Process {pid} does not end although it was killed; the kernel is busy with it.", pid=pid)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise CommandFailed(f"Process {pid} belongs to another user.", "Stop it as that user.", pid=pid) from error
