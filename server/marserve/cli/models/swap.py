"""`marserve swap`: another archive in the place of a version that serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from msgspec import to_builtins

from marserve.cli.dry_run import HEAD, lines_of, show_dry_run_of_sent
from marserve.cli.options import BatchSize, DryRun, Handler, Replace, SentAs, Upload
from marserve.cli.output import AsJson, Output, interrupted_as
from marserve.cli.progress.uploads import hinting_at_files, local_archive, send_named
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, known_roots, model_path
from marserve.cli.versions import progress_of
from marserve.errors import without_stop


def swap(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    url: Annotated[
        str,
        typer.Argument(
            help="The archive: its name in the model store, an allowed URL, or with a slash (./m.mar) a file of this "
            "machine, which is sent to the server."
        ),
    ],
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
    upload: Upload = None,
    replace: Replace = False,
    sent_as: SentAs = None,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Put an archive in the place of a version, without a gap, and only if it loads and answers as it should."""
    given: dict[str, str | int | None] = {
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
    roots = () if management is not None else known_roots(config)
    with (
        Output(as_json) as output,
        hinting_at_files(url, f"marserve swap {model}"),
        Management(find_address("management", management, config)) as server,
    ):
        file = local_archive(url, upload, roots)
        server.describe(model)  # first, so that an unknown name is an error before anything is sent or shown
        parameters["url"], sent = send_named(
            server, output, url, file, replaces=replace, is_dry_run=dry_run, name=sent_as
        )
        if dry_run:
            show_dry_run_of_sent(
                output,
                sent,
                lambda: _show_dry_run(output, _swap(server, output, model, parameters)),
                "put in the version's place; what the swap does",
                replaces=replace,
            )
            return
        outcome = _swap(server, output, model, parameters)
        if sent is not None:
            outcome["upload"] = to_builtins(sent)
        notes = (f"Note: {without_stop(note)}." for note in outcome.get("notes", []))
        output.result(outcome, outcome["status"], *notes)


def _show_dry_run(output: Output, outcome: Mapping[str, Any]) -> None:
    output.result(outcome, HEAD, *lines_of(outcome))


def _swap(server: Management, output: Output, model: str, parameters: Mapping[str, str | int]) -> dict[str, Any]:
    """Ask for the swap, or its dry run, and show how far it is."""
    goes_on = f"The swap of {model} goes on in the server; `marserve models {model}` shows how far it is."
    ended = f"The dry run was ended; of {model} nothing was changed."
    with interrupted_as(ended if "dry_run" in parameters else goes_on):
        outcome: dict[str, Any] = while_showing(
            lambda: server.order("POST", f"{model_path(model)}/swap", parameters, timeout_s=None),
            lambda: [progress_of(each) for each in server.describe(model)],
            output,
            f"Swapping {model}",
        )
    return outcome
