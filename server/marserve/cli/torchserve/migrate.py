"""`marserve migrate`: what a move from TorchServe asks for, read from its folder, and proof that answers stay alike.

`marserve migrate triton` is `migrate_triton.py`'s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from marserve.cli.options import DryRun
from marserve.cli.output import FAILED_STATUS, AsJson, CommandFailed, Output, WrongArguments, table
from marserve.cli.remote import ConfigFile, InferenceAddress, find_address
from marserve.errors import BadInput, without_stop

ANSWER_S = 120.0
_TRITON = "triton"


def migrate(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER|triton",
            help="TorchServe's folder: its settings, model store, start scripts. Or the word triton, and a repository.",
        ),
    ] = Path(),
    repository: Annotated[
        Path | None,
        typer.Argument(metavar="REPOSITORY", help="After triton: Triton's model repository, which is imported."),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also list what works as it did.")] = False,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="URL", help="A running TorchServe's inference address to compare with."),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option("--requests", metavar="PATH", help="What to ask both: cases as JSON, or FOLDER/MODEL/body files."),
    ] = None,
    export_path: Annotated[
        Path | None,
        typer.Option(
            "--export-path",
            "-o",
            metavar="FOLDER",
            help="With triton: the folder to make, with archives and settings; migrated if not given.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="With triton: write a folder anew that it has written before.")
    ] = False,
    dry_run: DryRun = False,
    inference: InferenceAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what of a TorchServe installation works, differs, or needs doing first; exit status 1 if anything does.

    With --compare URL and --requests PATH both servers are asked the same, and answers that differ are listed instead.

    With triton REPOSITORY archives and settings are made of Triton's models; what could not be mapped is listed.
    """
    with Output(as_json) as output:
        is_triton = str(folder) == _TRITON
        _check_words(
            folder, repository, compares=compare is not None, writes=export_path is not None or force or dry_run
        )
        if is_triton and repository is not None:
            # Late: it needs what writes archives, and the survey does not.
            from marserve.cli.torchserve.migrate_triton import import_repository

            import_repository(output, repository, export_path, force=force, is_dry=dry_run, show_all=show_all)
            return
        if (compare is None) != (requests is None):
            raise WrongArguments("--compare and --requests belong together.", "Give both, or neither.")
        if compare is not None and requests is not None:
            _compare(output, compare, requests, find_address("inference", inference, config))
        else:
            _survey(output, folder, show_all)


def _check_words(folder: Path, repository: Path | None, *, compares: bool, writes: bool) -> None:
    """Raise WrongArguments for words and options that do not belong together."""
    if repository is not None and str(folder) != _TRITON:
        raise WrongArguments(f"{folder} {repository}: one folder is surveyed, or triton REPOSITORY is imported.")
    if str(folder) == _TRITON and repository is None:
        raise WrongArguments(
            "marserve migrate triton takes the folder of Triton's model repository.",
            "Name it behind triton; a folder of TorchServe's with this name is ./triton.",
        )
    if repository is not None and compares:
        raise WrongArguments("--compare asks a TorchServe, and does not go with triton.")
    if repository is None and writes:
        raise WrongArguments("--export-path, --force and --dry-run go with triton REPOSITORY; a survey writes nothing.")


def _survey(output: Output, folder: Path, show_all: bool) -> None:
    # Late: reading archives and trying a start need parts of the server that other commands do not import.
    from marserve.app.trial import try_start
    from marserve.cli.torchserve.finding_lines import lines_of
    from marserve.cli.torchserve.torchserve import parser, settings_of_command
    from marserve.migration.findings import as_document, counts
    from marserve.migration.survey import survey

    flags = [flag for action in parser()._actions for flag in action.option_strings]
    try:
        findings = survey(
            folder, flags=flags, read_command=settings_of_command, environment=os.environ, try_start=try_start
        )
    except NotADirectoryError as error:
        raise WrongArguments(
            f"{without_stop(error)}.", "Name the folder that holds config.properties or the model store."
        ) from error
    number = counts(findings)
    document: dict[str, Any] = {"folder": str(folder), "counts": number, "findings": as_document(findings)}
    output.result(document, *lines_of(findings, folder, show_all=show_all))
    if number["action"]:
        raise typer.Exit(FAILED_STATUS)


def _compare(output: Output, old_url: str, requests: Path, new_url: str) -> None:
    # Late, as above.
    from marserve.migration.compare import compare, read_cases

    try:
        cases = read_cases(requests)
    except BadInput as error:
        raise CommandFailed(error.message, "See docs/migrating.md for the form of requests.") from error
    with _client(old_url) as old, _client(new_url) as new:
        try:
            found = compare(cases, old, new)
        except httpx.HTTPError as error:
            where = str(error.request.url) if error._request is not None else "a server"
            raise CommandFailed(
                f"{where} did not answer: {without_stop(error)}.", "Start both servers with the same models."
            ) from error
    document = {
        "cases": len(cases),
        "differences": [{"case": d.case, "where": d.where, "old": d.old, "new": d.new} for d in found.differences],
        "refusedAlike": found.refused_alike,
    }
    rows = [[each.case, each.where, each.old, each.new] for each in found.differences]
    differing = len({each.case for each in found.differences})
    said = f"{len(cases)} requests: {len(cases) - differing} answered alike, {differing} not."
    if found.refused_alike:
        said += f"\nBoth servers refused {', '.join(found.refused_alike)}: was that meant?"
    output.result(document, *([table(["request", "where", "TorchServe", "marserve"], rows)] if rows else []), said)
    if found.differences:
        raise typer.Exit(FAILED_STATUS)


def _client(url: str) -> httpx.Client:
    if url.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"), verify=False)
        return httpx.Client(transport=transport, base_url="http://localhost", timeout=ANSWER_S)
    return httpx.Client(base_url=url, timeout=ANSWER_S)
