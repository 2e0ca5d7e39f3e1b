"""`marserve run`: serves a model from a file, in this terminal, without a store, an archive or settings.

It stages the source as `marserve archive` would pack it, in a private folder, and runs a server in this process whose
only model that is. Everything the user's code does happens in workers.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shlex
import signal
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from marserve.api.port_holder import say_holder
from marserve.api.sockets import bind
from marserve.archive.writing.sources import Wishes, is_hub_address
from marserve.archive.writing.staging import Staging
from marserve.cli import INTERRUPTED_STATUS
from marserve.cli.options import BatchSize, MaxBatchDelay
from marserve.cli.output import CONFIGURATION_STATUS, AsJson, CommandFailed, Output, WrongArguments
from marserve.cli.run.screen import Screen
from marserve.cli.run.source import LocalModel, advice_on
from marserve.cli.server.foreground import held_signals, leave, serve
from marserve.cli.server.pid_file import MARSERVE_WORD, PidFile
from marserve.cli.server.start import pairs_of
from marserve.cli.typed_settings import load_as_typed
from marserve.machine.start_watch import StartWatch
from marserve.registry.intake.scratch import Scratch
from marserve.settings import KEYS, Address, Settings

# Settings that name models, or that write into the working directory: a server of one model has its own.
_OTHER_MODELS = {"desired_state": "", "watches": "[]", "config_snapshots": "false", "model_snapshot": ""}
_SPELLING = {
    **dict.fromkeys(("inference_address", "management_address", "metrics_address"), "--host and --port"),
    **dict.fromkeys(("load_models", "model_store", "state_folder", "token_file", "log_location"), "marserve run"),
    **dict.fromkeys((*_OTHER_MODELS, "unprotected_management", "default_workers_per_model"), "marserve run"),
    **dict.fromkeys(("expose_errors", "predict_route"), "marserve run"),
}


def run(
    source: Annotated[
        str,
        typer.Argument(
            help="FILE.py[:OBJECT], a program (.onnx, .pt2, TorchScript), a folder, an archive, or a model of a hub: "
            "hf://OWNER/NAME@REVISION.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="The model's name; as its class, function or file if not given.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", min=0, max=65534, help="8080 if not given; 0 takes a free one.")
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="ADDRESS", help="Where to listen; this machine alone if not given.")
    ] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="When a file of the model changes, put what it is then in its place.")
    ] = False,
    batch_size: BatchSize = None,
    max_batch_delay: MaxBatchDelay = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Worker processes; 1 if the model does not say.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|gpu|N[,N…]", help="Where workers compute.")
    ] = None,
    extra_files: Annotated[
        list[str] | None,
        typer.Option("--extra-file", "-x", help="A further file, folder or wildcard of the model; may be repeated."),
    ] = None,
    serialized_file: Annotated[
        Path | None, typer.Option("--serialized-file", "-s", help="Weights for a handler in TorchServe's shape.")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config-file", "-c", help="model-config.yaml beside the source if not given.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Of a model of transformers, where its files do not say: its task.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of config.properties; may be repeated."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print tracebacks, and print them whole.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a model from a file, in this terminal."""
    began = time.monotonic()
    with Output(as_json) as output:
        options = _options(batch_size, max_batch_delay, workers, device)
        wishes = Wishes(name, "1.0", tuple(extra_files or ()), serialized_file, None, config_file, options, task)
        scratch = Scratch(None)
        signal.signal(signal.SIGTERM, leave)  # as Ctrl-C: it leaves nothing behind, also before the server is up
        try:
            with contextlib.closing(_find(source, wishes, settings or [], scratch.path, output)) as model:
                entry = _stage(model, output, follows=reload, verbose=verbose)
                loaded = _settings(model, entry, host, port, settings or [], scratch.path)
                _refuse_taken(loaded.inference_address, source)
                screen = _screen(model, output, loaded, follows=reload, is_verbose=verbose)
                status = _serve(loaded, model, screen, scratch.path, began, follows=reload)
        finally:
            scratch.remove()
        raise typer.Exit(status)


def _find(source: str, wishes: Wishes, set_words: Sequence[str], folder: Path, output: Output) -> LocalModel:
    """The model of a source, which is fetched first if it is a hub's."""
    staging = Staging(folder / "models")
    if not is_hub_address(source):
        return LocalModel(source, wishes, staging)
    # Late: few runs fetch anything, and what shows the progress is a thirtieth of the others' start.
    from marserve.cli.local.hub import fetch_model

    pairs = pairs_of(set_words)
    flags = {"model_store": str(staging.root), **pairs}
    settings = load_as_typed(flags, pairs, spelling=_SPELLING, reads_file=False)
    found = fetch_model(source, wishes, settings, folder / "hub", output)
    return LocalModel(str(found.path), wishes, staging, address=found.address)


def _stage(model: LocalModel, output: Output, *, follows: bool, verbose: bool) -> str:
    """Stage the source; returns the store's entry. Raises WrongArguments."""
    if follows and not model.can_change:
        raise WrongArguments(f"--reload follows files that you edit, and {model.shown} is not one; leave it out.")
    model.find()
    if model.is_importing:
        gc.disable()  # as below
        try:
            # Here, so that both imports run side by side: that of the web framework takes a second, too.
            with held_signals():
                import_module("marserve.app.server")
        finally:
            gc.enable()
    try:
        entry = model.stage_first(lambda file: output.say_wait(f"Importing {file} …"))
    except WrongArguments as error:
        if verbose and error.detail.get("traceback"):
            output.note(error.detail["traceback"])
            error.next_step = None
        raise
    if model.warning:
        output.note(f"Warning: {model.warning}")
    return entry


def _options(
    batch_size: int | None, max_batch_delay: int | None, workers: int | None, device: str | None
) -> dict[str, Any]:
    """The flags as keys of a model's configuration."""
    options: dict[str, Any] = {}
    if batch_size is not None:
        options["batchSize"] = batch_size
    if max_batch_delay is not None:
        options |= {"maxBatchDelay": max_batch_delay, "batchPolicy": "fixed"}
    if workers is not None:
        options |= {"minWorkers": workers, "maxWorkers": workers}
    if device in ("cpu", "gpu"):
        options["deviceType"] = device
    elif device is not None:
        try:
            options |= {"deviceType": "gpu", "deviceIds": [int(word) for word in device.split(",")]}
        except ValueError:
            raise WrongArguments(f"--device takes cpu, gpu or numbers such as 0,1; it got {device!r}.") from None
    return options


def _settings(
    model: LocalModel, entry: str, host: str | None, port: int | None, set_words: Sequence[str], folder: Path
) -> Settings:
    """The settings of the server: these flags, then variables, then defaults.

    No file of the working directory is read or written: what the server keeps is in its private `folder`.
    """
    pairs = pairs_of(set_words)
    given = {name for name in KEYS if KEYS[name].env in os.environ} | pairs.keys()
    key = KEYS["inference_address"]
    said = str(pairs.get(key.name) or os.environ.get(key.env) or key.defaults["marserve"])
    address = _address(said, host, port)
    flags: dict[str, object] = {
        "inference_address": address,
        "model_store": str(model.staging.root),
        "load_models": f"{model.name}={entry}",
        **{name: value for name, value in _OTHER_MODELS.items() if name in given},
    }
    # Where neither a variable nor --set says otherwise: one port for all, one worker.
    further = {
        "management_address": address,
        "metrics_address": address,
        "unprotected_management": "loopback",
        "default_workers_per_model": 1,
        "state_folder": str(folder / "state"),
        "token_file": str(folder / "key_file.json"),
        "log_location": str(folder / "logs"),
    }
    if "expose_errors" in KEYS and _is_loopback(address):
        further["expose_errors"] = "traceback"
    if model.is_litserve:
        further["predict_route"] = "/predict"
    flags |= {name: value for name, value in further.items() if name not in given}
    return load_as_typed(flags | pairs, pairs, spelling=_SPELLING, reads_file=False)


def _address(said: str, host: str | None, port: int | None) -> str:
    """The address that is said elsewhere, with this host and port, where they are given."""
    if host is None and port is None:
        return said
    scheme, _, rest = said.partition("://")
    if not rest:  # the file of a socket
        scheme, rest = "http", "127.0.0.1:8080"
    before_host, _, before_port = rest.rstrip("/").rpartition(":")
    host = before_host if host is None else f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{before_port if port is None else port}"


def _is_loopback(address: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme == "unix" or Address("http", parts.hostname or "").is_loopback


def _refuse_taken(address: Address, source: str) -> None:
    """Raise CommandFailed if something listens on the port, with the process that does."""
    if address.scheme == "unix" or not address.port:
        return
    try:
        bind(address.host, address.port).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return  # the server says what is wrong with it
        raise CommandFailed(
            f"Port {address.port} is in use by {say_holder(address.port) or 'another process'}.",
            f"`marserve run {shlex.quote(source)} --port 0` takes a free one, --port N another.",
        ) from None


def _screen(model: LocalModel, output: Output, loaded: Settings, *, follows: bool, is_verbose: bool) -> Screen:
    return Screen(
        output,
        model.shown,
        model.name,
        model.version,
        model.staging.root,
        folder=None if model.planned is None else model.planned.folder,
        follows=follows,
        is_verbose=is_verbose,
        is_litserve=model.is_litserve,
        example=model.example,
        body_words=model.body_words,
        keys=None if loaded.disable_token_authorization else loaded.token_file,
        explains=bool(loaded.flight_recorder_size),
    )


def _serve(loaded: Settings, model: LocalModel, screen: Screen, folder: Path, began: float, *, follows: bool) -> int:
    """Run the server until it is stopped; returns the exit status."""
    gc.disable()  # for these imports, and on until the server is up, as `serve` has it
    # Late: it imports the web framework, which takes a second that a refusal above need not cost.
    from marserve.app.local_run import Failure, LocalRun, Reload

    def explain() -> Failure | None:
        fault = model.find_fault()
        advice = advice_on(fault) if fault is not None else None
        return None if fault is None else Failure(fault.message, next_step=advice or "", is_of_source=True)

    def stage_again() -> str | None:
        return model.stage_again(screen.changed)

    reload = Reload(model.folders, stage_again, model.staging.forget_old, model.end_import) if follows else None
    companion = LocalRun(
        model.name,
        began=began,
        on_ready=screen.ready,
        on_failure=screen.failed,
        on_swapped=screen.swapped,
        shorten=lambda text: model.with_own_paths(screen.shorten(text)),
        with_own_paths=model.with_own_paths,
        explain=explain,
        on_slow=screen.slow,
        on_finishing=screen.finishing,
        reload=reload,
        binds_grpc=any(loaded.origins.get(f"grpc_{which}_port") for which in ("inference", "management")),
    )
    status = serve(loaded, PidFile(folder / "server.pid", MARSERVE_WORD), StartWatch(), companion)
    if companion.has_bad_source:
        return CONFIGURATION_STATUS
    return INTERRUPTED_STATUS if companion.was_interrupted and not status else status
