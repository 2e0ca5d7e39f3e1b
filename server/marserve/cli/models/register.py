"""`marserve register`: brings an archive into a running server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from marserve.cli import options
from marserve.cli.dry_run import show_dry_run, show_dry_run_of_sent
from marserve.cli.output import AsJson, Interrupted, Output
from marserve.cli.progress.downloads import AwaitedDownload
from marserve.cli.progress.registering import register_and_show
from marserve.cli.progress.uploads import hinting_at_files, local_archive, send_named
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, known_roots


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
    upload: options.Upload = None,
    replace: options.Replace = False,
    sent_as: options.SentAs = None,
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
    with (
        Output(as_json) as output,
        hinting_at_files(url, "marserve register"),
        Management(find_address("management", management, config)) as server,
    ):
        file = local_archive(url, upload, roots)
        parameters["url"], sent = send_named(
            server, output, url, file, replaces=replace, is_dry_run=dry_run, name=sent_as
        )
        download = AwaitedDownload(server, url)
        if dry_run:
            show_dry_run_of_sent(
                output,
                sent,
                lambda: _show_dry_run(server, output, parameters, download),
                "registered; what the registration does",
                replaces=replace,
            )
            return
        document = register_and_show(server, output, parameters, download)
        if sent:
            document["upload"] = msgspec.to_builtins(sent)
        output.result(document, document["status"])


def _show_dry_run(
    server: Management, output: Output, parameters: Mapping[str, str | int], download: AwaitedDownload
) -> None:
    """Show the dry run. The server fetches the archive for it, which may take long."""
    url = parameters["url"]
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
