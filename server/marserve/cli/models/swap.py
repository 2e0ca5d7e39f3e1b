"""`marserve swap`: another archive in the place of a version that serves."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.dry_run import HEAD, lines_of
from marserve.cli.options import BatchSize, DryRun, Handler
from marserve.cli.output import AsJson, Output, interrupted_as
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path
from marserve.cli.versions import progress_of
from marserve.errors import without_stop


def swap(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    url: Annotated[str, typer.Argument(help="The archive: its name in the model store, or an allowed URL.")],
    version: Annotated[
        str | None,
        typer.Option("--version", help="Whose place is taken: of the archive's version, else the default's."),
    ] = None,
    order: Annotated[
        str | None, typer.Option("--order", help="load_first, or unload_first where memory is short; as configured.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Workers to start with; as many as before if not given.")
    ] = None,
    keep_old: Annotated[bool, typer.Option("--keep-old", help="Leave the other version registered.")] = False,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Send it its samples before it answers.")] = True,
    handler: Handler = None,
    batch_size: BatchSize = None,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Put an archive in the place of a version, without a gap, and only if it loads and answers as it should."""
    given: dict[str, str | int | None] = {
        "url": url,
        "version": version,
        "order": order,
        "initial_workers": workers,
        "keep_old": "true" if keep_old else None,
        "check": None if check else "false",
        "handler": handler,
        "batch_size": batch_size,
        "dry_run": "true" if dry_run else None,
    }
    parameters = {name: value for name, value in given.items() if value is not None}
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        server.describe(model)  # first, so that an unknown name is an error before anything is shown
        goes_on = f"The swap of {model} goes on in the server; `marserve models {model}` shows how far it is."
        ended = f"The dry run was ended; of {model} nothing was changed."
        with interrupted_as(ended if dry_run else goes_on):
            outcome = while_showing(
                lambda: server.order("POST", f"{model_path(model)}/swap", parameters, timeout_s=None),
                lambda: [progress_of(each) for each in server.describe(model)],
                output,
                f"Swapping {model}",
            )
        notes = (f"Note: {without_stop(note)}." for note in outcome.get("notes", []))
        output.result(outcome, *((HEAD, *lines_of(outcome)) if dry_run else (outcome["status"], *notes)))
