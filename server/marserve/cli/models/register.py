"""`marserve register`: brings an archive into a running server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from marserve.cli import options
from marserve.cli.dry_run import show_dry_run
from marserve.cli.output import AsJson, Interrupted, Output
from marserve.cli.progress.downloads import AwaitedDownload
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address
from marserve.cli.versions import Description, label, progress_of, ready_workers


def register(
    url: Annotated[str, typer.Argument(help="The archive: its name in the model store, or an allowed URL.")],
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
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        download = AwaitedDownload(server, url)
        if dry_run:
            _show_dry_run(server, output, parameters, download)
            return
        before = {label(version) for version in server.describe_all()}

        def appeared() -> list[Description]:
            return [version for version in server.describe_all() if label(version) not in before]

        try:
            answer = while_showing(
                lambda: server.order("POST", "/models", {**parameters, "synchronous": "true"}, timeout_s=None),
                lambda: download.steps() or [progress_of(version) for version in appeared()],
                output,
                f"Registering {url}",
            )
        except KeyboardInterrupt:
            if download.cancel():
                raise Interrupted(f"The download of {url} is cancelled; nothing is registered.") from None
            raise Interrupted(
                f"The registration of {url} goes on in the server; `marserve models` shows how far it is."
            ) from None
        output.result(
            {
                "status": answer["status"],
                "registered": [
                    {
                        "model": version["modelName"],
                        "version": version["modelVersion"],
                        "isDefault": version.get("isDefault"),
                        "readyWorkers": ready_workers(version),
                    }
                    for version in appeared()
                ],
            },
            answer["status"],
        )


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
