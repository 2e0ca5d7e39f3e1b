"""`marserve start`: brings a server up, behind this command until its models are loaded, or in front of it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, CommandFailed, Output
from marserve.cli.server.foreground import serve
from marserve.cli.server.pid_file import AlreadyRunning, PidFile, marserve_pid_file
from marserve.cli.typed_settings import FLAGS, load_as_typed
from marserve.errors import BadSettings
from marserve.machine.start_watch import StartWatch
from marserve.settings import KEYS, Settings


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
        typer.Option("--models", metavar="[NAME=]ARCHIVE …", help="Load these archives, or `all`; may be repeated."),
    ] = None,
    workflow_store: Annotated[
        Path | None,
        typer.Option("--workflow-store", metavar="FOLDER", help="Workflow archives; the model store if not given."),
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
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --foreground: print the logs here; also what is set where.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Start a server. It goes into the background, and this command ends when the models are loaded."""
    began = time.monotonic()
    with Output(as_json) as output, contextlib.closing(StartWatch()) as watch:
        flags: dict[str, object] = {
            "ts_config": _text(ts_config),
            "model_store": _text(model_store),
            "load_models": models,
            "workflow_store": _text(workflow_store),
            "desired_state": desired_state,
            "default_workers_per_model": workers,
            "inference_address": inference_address,
            "management_address": management_address,
            "metrics_address": metrics_address,
        }
        pairs = pairs_of(settings or [])
        flags = {key: value for key, value in flags.items() if value is not None} | pairs
        loaded = load_as_typed(flags, pairs)
        pid_file = marserve_pid_file(str(loaded.management_address))
        try:
            if dry_run:
                # Late: it imports parts that a start in the background does not need.
                from marserve.cli.server.start_dry_run import show_dry_run_of_start

                show_dry_run_of_start(loaded, pid_file, output)
                return
            if foreground:
                raise typer.Exit(_serve_here(loaded, pid_file, watch, began, verbose=verbose))
            # Late: a server in the foreground needs no HTTP client, and starts sooner without one.
            from marserve.cli.server.start_behind import start_behind

            start_behind(loaded, _as_arguments(flags, pairs), pid_file, timeout, output, is_verbose=verbose)
        except AlreadyRunning as error:
            # Late, as above.
            from marserve.cli.server.start_behind import command_for

            stopping = command_for("stop", str(loaded.management_address))
            raise CommandFailed(
                f"A server runs already at {loaded.management_address}, as process {error.pid}.",
                f"Stop it with {stopping}, or start this one on other addresses.",
                pid=error.pid,
            ) from error


def _serve_here(loaded: Settings, pid_file: PidFile, watch: StartWatch, began: float, *, verbose: bool) -> int:
    """Serve in this process. A person gets one block and what asks for something; anything else gets the logs."""
    if verbose or loaded.log_format != "text" or not _is_watched():
        return serve(loaded, pid_file, watch)
    # Late: a server whose output no person reads needs no block.
    from marserve.cli.server.start_block import StartScreen, coloured, plain

    logs = loaded.log_location or loaded.working_directory / "logs"
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    shown = os.path.relpath(logs, loaded.working_directory)
    screen = StartScreen(_show, began, shown, coloured if has_colours else plain)
    return serve(dataclasses.replace(loaded, log_location=logs), pid_file, watch, screen)


def _is_watched() -> bool:
    """Whether a person reads what is printed: output or errors go to a terminal, as in `marserve start … | tee file`.

    A container's log and a service manager's journal have neither.
    """
    return any(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


def _show(text: str) -> None:
    """Print lines at once. A reader that has gone, such as `head -1`, ends the printing and not the server."""
    try:
        print(text, flush=True)
    except OSError:
        # What is still buffered would fail again when the process ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def pairs_of(settings: Sequence[str]) -> dict[str, object]:
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
