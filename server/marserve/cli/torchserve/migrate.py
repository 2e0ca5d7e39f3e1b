"""`marserve migrate`: what a move from TorchServe asks for, read from its folder, and proof that answers stay alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from marserve.cli.output import FAILED_STATUS, AsJson, CommandFailed, Output, WrongArguments, table
from marserve.cli.remote import ConfigFile, InferenceAddress, find_address
from marserve.errors import BadInput, without_stop

ANSWER_S = 120.0


def migrate(
    folder: Annotated[
        Path, typer.Argument(help="TorchServe's folder: its settings, model store, start scripts.")
    ] = Path(),
    show_all: Annotated[bool, typer.Option("--all", help="Also list what works as it did.")] = False,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="URL", help="A running TorchServe's inference address to compare with."),
    ] = None,
    requests: Annotated[
        Path | None,
        typer.Option("--requests", metavar="PATH", help="What to ask both: cases as JSON, or FOLDER/MODEL/body files."),
    ] = None,
    inference: InferenceAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say what of a TorchServe installation works, differs, or needs doing first; exit status 1 if anything does.

    With --compare URL and --requests PATH both servers are asked the same, and answers that differ are listed instead.
    """
    with Output(as_json) as output:
        if (compare is None) != (requests is None):
            raise WrongArguments("--compare and --requests belong together.", "Give both, or neither.")
        if compare is not None and requests is not None:
            _compare(output, compare, requests, find_address("inference", inference, config))
        else:
            _survey(output, folder, show_all)


def _survey(output: Output, folder: Path, show_all: bool) -> None:
    # Late: reading archives and trying a start need parts of the server that other commands do not import.
    from marserve.app.trial import try_start
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
    words = {"action": "needs action", "differs": "differs", "works": "works"}
    rows = [
        [words[each.verdict], each.place, _sentences(each.what, each.fix)]
        for each in findings
        if show_all or each.verdict != "works"
    ]
    summary = ", ".join(f"{number[verdict]} {word}" for verdict, word in words.items())
    document: dict[str, Any] = {"folder": str(folder), "counts": number, "findings": as_document(findings)}
    output.result(document, *([table(["", "where", "what"], rows)] if rows else []), f"{folder}: {summary}.")
    if number["action"]:
        raise typer.Exit(FAILED_STATUS)


def _sentences(what: str, fix: str) -> str:
    return f"{what.rstrip('.')}. {fix[:1].upper()}{fix[1:]}." if fix else what


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
