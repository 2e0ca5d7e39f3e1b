"""`marserve register`: brings an archive into a running server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer
from rich.filesize import decimal

from marserve.answers.management import UploadedArchive
from marserve.cli import options
from marserve.cli.dry_run import HEAD, as_dry, show_dry_run
from marserve.cli.output import AsJson, CommandFailed, Interrupted, Output
from marserve.cli.progress.downloads import AwaitedDownload
from marserve.cli.progress.registering import register_and_show
from marserve.cli.progress.uploads import local_archive, send_archive
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, known_roots
from marserve.store.addresses.pinned_digest import split_digest


def register(
    url: Annotated[
        str,
        typer.Argument(
            help="The archive: its name in the model store, an allowed URL, or with a slash (./m.mar) a file of this "
            "machine, which is sent to the server."
        ),
    ],
    name: Annotated[str | None, typer.Option("--name", help="Register under this name, not the archive's.")] = None,
    workers: Annotated[int, typer.Option("--workers", min=0, help="How many workers to start and wait for.")] = 1,
    handler: options.Handler = None,
    batch_size: options.BatchSize = None,
    max_batch_delay: options.MaxBatchDelay = None,
    response_timeout: options.ResponseTimeout = None,
    startup_timeout: options.StartupTimeout = None,
    memory: options.Memory = None,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Load it at its first request, and let it make room for others.")
    ] = False,
    pinned: options.Pinned = False,
    upload: Annotated[
        bool | None,
        typer.Option("--upload/--no-upload", help="Send the file to the server, or leave the name to the server."),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Let the file take the place of another one of its name that no version uses."),
    ] = False,
    dry_run: options.DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Register an archive as a model, or as another version of one, and wait until it is loaded."""
    given = {
        "url": url,
        "model_name": name,
        "handler": handler,
        "batch_size": batch_size,
        "max_batch_delay": max_batch_delay,
        "response_timeout": response_timeout,
        "startup_timeout": startup_timeout,
        "initial_workers": workers,
        "memory": memory,
        "load": "on_demand" if on_demand else None,
        "pinned": "true" if pinned else None,
    }
    parameters: dict[str, str | int] = {key: value for key, value in given.items() if value is not None}
    roots = () if management is not None else known_roots(config)
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        file = local_archive(url, upload, roots)
        sent = None
        if file is not None:
            sent = send_archive(server, output, file, replaces=replace, is_dry_run=dry_run)
            pin = split_digest(url)[1]
            parameters["url"] = file.name if pin is None else f"{file.name}#sha256={pin}"
            if sent is None:
                output.note(f"This server takes no uploads, so {file.name} is looked for in its own model store.")
        download = AwaitedDownload(server, url)
        if dry_run:
            _show_dry_run(server, output, parameters, download, sent, replaces=replace)
            return
        document = register_and_show(server, output, parameters, download)
        if sent:
            document["upload"] = msgspec.to_builtins(sent)
        output.result(document, document["status"])


def _show_dry_run(
    server: Management,
    output: Output,
    parameters: Mapping[str, str | int],
    download: AwaitedDownload,
    sent: UploadedArchive | None,
    *,
    replaces: bool,
) -> None:
    """Show the dry run. The server fetches the archive for it, which may take long; one of this machine it has seen.

    With `replaces` the store may have another file of the name, whose registration would say nothing of the one sent.
    """
    url = parameters["url"]
    if sent:
        output.note(
            f"{sent.archive} ({decimal(sent.bytes)}) would be sent; the server has checked it and kept nothing."
        )
    if sent and replaces:
        _show_sent(output, sent)
        return
    try:
        show_dry_run(
            server,
            output,
            "POST",
            "/models",
            {**parameters, "synchronous": "true"},
            look=download.steps,
            title=f"Looking at {url}",
            timeout_s=None,
        )
    except KeyboardInterrupt:
        download.cancel()
        raise Interrupted(f"The look at {url} is given up; nothing was changed.") from None
    except CommandFailed as failure:
        if sent is None or failure.detail.get("code") != 404:
            raise
        _show_sent(output, sent)


def _show_sent(output: Output, sent: UploadedArchive) -> None:
    """Show the dry run of an upload and its registration, of which the server can say nothing yet."""
    output.result(
        as_dry({"upload": msgspec.to_builtins(sent)}),
        HEAD,
        f"{sent.archive}: sent to the server and registered; what the registration does can be said when it is there",
    )
