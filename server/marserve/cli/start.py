"""`marserve start`: brings a server up, behind this command until its models are loaded, or in front of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from marserve.cli.background import start_server
from marserve.cli.foreground import serve
from marserve.cli.output import AsJson, CommandFailed, Interrupted, Output, Step
from marserve.cli.pid_file import MARSERVE_WORD, AlreadyRunning, PidFile, marserve_pid_file
from marserve.cli.remote import Inference, Management
from marserve.cli.typed_settings import FLAGS, load_as_typed
from marserve.cli.versions import Description, has_failed, is_ready, label, last_death, progress_of, versions_table
from marserve.cli.watch import LOOK_EVERY_S, Lines
from marserve.errors import BadSettings
from marserve.settings import KEYS, Settings

CONSOLE_LOG = "console.log"
"""What a server in the background says on standard error, in its log folder: nothing, unless it breaks."""


def start(
    foreground: Annotated[bool, typer.Option("--foreground", help="Serve in this terminal; Ctrl-C stops it.")] = False,
    ts_config: Annotated[
        Path | None,
        typer.Option("--ts-config", "--config", metavar="FILE", help="Settings; config.properties here if not given."),
    ] = None,
    model_store: Annotated[
        Path | None,
        typer.Option(
            "--model-store",
            metavar="FOLDER",
            help=f"The folder of archives; {KEYS['model_store'].defaults['marserve']} here if not given.",
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option("--models", metavar="[NAME=]ARCHIVE", help="Load this archive, or `all`; may be repeated."),
    ] = None,
    desired_state: Annotated[
        str | None,
        typer.Option("--desired-state", metavar="FILE|URL", help="The document that alone decides about models."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=0, help=KEYS["default_workers_per_model"].sentence)
    ] = None,
    inference_address: Annotated[
        str | None, typer.Option("--inference-address", metavar="URL", help=KEYS["inference_address"].sentence)
    ] = None,
    management_address: Annotated[
        str | None, typer.Option("--management-address", metavar="URL", help=KEYS["management_address"].sentence)
    ] = None,
    metrics_address: Annotated[
        str | None, typer.Option("--metrics-address", metavar="URL", help=KEYS["metrics_address"].sentence)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of config.properties; may be repeated."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="In the background: how long to wait for the models, in s.")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Start a server. It goes into the background, and this command ends when the models are loaded."""
    with Output(as_json) as output:
        flags: dict[str, object] = {
            "ts_config": _text(ts_config),
            "model_store": _text(model_store),
            "load_models": models,
            "desired_state": desired_state,
            "default_workers_per_model": workers,
            "inference_address": inference_address,
            "management_address": management_address,
            "metrics_address": metrics_address,
        }
        pairs = _pairs(settings or [])
        flags = {key: value for key, value in flags.items() if value is not None} | pairs
        loaded = load_as_typed(flags, pairs)
        pid_file = marserve_pid_file(str(loaded.management_address))
        try:
            if foreground:
                raise typer.Exit(serve(loaded, pid_file))
            _start_behind(loaded, _as_arguments(flags, pairs), pid_file, timeout, output)
        except AlreadyRunning as error:
            raise CommandFailed(
                f"A server runs already at {loaded.management_address}, as process {error.pid}.",
                "Stop it with `marserve stop`, or start this one on other addresses.",
                pid=error.pid,
            ) from error


def _start_behind(
    settings: Settings, arguments: Sequence[str], pid_file: PidFile, timeout_s: float, output: Output
) -> None:
    """Start a process of its own for the server, and wait until its models are loaded or one cannot be."""
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
        # Nobody reads its standard output, so it writes files even where a server in front would not.
        logs = settings.log_location or settings.working_directory / "logs"
        warnings = [*settings.warnings, *settings.notes]
        for warning in warnings:
            output.note(f"Warning: {warning}")
        process = _spawn(arguments, logs)
        try:
            versions = _wait_until_settled(process, front, back, time.monotonic() + timeout_s, output, logs)
        except KeyboardInterrupt:
            raise Interrupted(
                f"The server goes on as process {process.pid}; `marserve stop` ends it.", pid=process.pid
            ) from None
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
            "models": versions,
        }
        if failures:
            what = (
                f"{failures[0]}." if len(failures) == 1 else "\n".join([f"{len(failures)} failed:", *_indent(failures)])
            )
            raise CommandFailed(
                f"The server runs as process {process.pid}, but {what}",
                f"More stands in {logs}. `marserve stop` ends the server.",
                **document,
            )
        output.result(
            document,
            f"marserve answers at {front.address} (management {back.address}, process {process.pid}).",
            versions_table(versions) if versions else "No model is loaded; `marserve register ARCHIVE` adds one.",
        )


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _spawn(arguments: Sequence[str], logs: Path) -> subprocess.Popen[bytes]:
    """The server's process. What it says before its logs are open, and Python's last words, go to the console log."""
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
    process: subprocess.Popen[bytes], front: Inference, back: Management, deadline: float, output: Output, logs: Path
) -> list[Description]:
    """Wait until each version has loaded or failed; returns how all versions then are. `deadline` is monotonic.

    Raises CommandFailed when the server ends meanwhile, or when time is up (it goes on loading then).
    """
    with output.progress() as progress:
        lines = Lines(progress)
        lines.show([Step("Starting the server")])
        while _still_runs(process):
            if front.is_alive():
                startup = front.startup()
                versions = back.describe_all()
                lines.show([progress_of(version) for version in versions] or [Step("Reading the models")])
                if startup.is_well and all(is_ready(version) or has_failed(version) for version in versions):
                    return versions
            if time.monotonic() >= deadline:
                raise CommandFailed(
                    f"The server runs as process {process.pid}, but its models are not loaded yet.",
                    "It goes on loading: `marserve status` tells how far it is, `marserve stop` ends it.",
                    pid=process.pid,
                )
    words = (logs / CONSOLE_LOG).read_text("utf-8", "replace").strip().splitlines()
    raise CommandFailed(
        words[-1].removeprefix("marserve: ").replace("marserve did not", "The server did not", 1)
        if words
        else f"The server ended with status {process.returncode}.",
        f"More stands in the logs in {logs}; `marserve start --foreground` shows it here.",
        exit_status=process.returncode,
    )


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process runs, after a moment in which it may have ended."""
    try:
        process.wait(timeout=LOOK_EVERY_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _pairs(settings: Sequence[str]) -> dict[str, object]:
    """`KEY=VALUE` words as flags; the later of two wins."""
    pairs: dict[str, object] = {}
    for word in settings:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise BadSettings(f"--set takes KEY=VALUE, as in --set job_queue_size=500; it got {word!r}")
        pairs[key.strip()] = value
    return pairs


def _as_arguments(flags: dict[str, object], pairs: dict[str, object]) -> list[str]:
    """The arguments that give another `marserve start` the same flags; `pairs` are those given with `--set`."""
    arguments = []
    for key, value in flags.items():
        if key in pairs:
            arguments += ["--set", f"{key}={value}"]
            continue
        flag = "--config" if key == "ts_config" else FLAGS[key]
        for text in value if isinstance(value, list) else [value]:
            arguments += [flag, str(text)]
    return arguments
