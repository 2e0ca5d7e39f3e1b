"""`marserve check`: whether a model answers batches as it answers single requests."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Annotated, Any

import typer

from marserve.cli.options import Version
from marserve.cli.output import FAILED_STATUS, AsJson, Output, WrongArguments, table
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path

# Each sample is run several times; a check that takes longer needs fewer samples.
LIMIT_S = 600.0


def check(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    sample: Annotated[
        list[Path] | None,
        typer.Option("--sample", metavar="FILE", help="An input to try; repeatable. The model's own if not given."),
    ] = None,
    version: Version = None,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Compare batches with single requests and show where the answers differ; exit status 1 if they do."""
    with Output(as_json) as output:
        files = [("sample", _read(path)) for path in sample or []]
        with Management(find_address("management", management, config)) as server:
            report = server.order("POST", f"{model_path(model, version)}/check", timeout_s=LIMIT_S, files=files or None)
        rows = [
            [each["run"], "all" if each["item"] < 0 else str(each["item"]), each["path"], each["seen"], each["wanted"]]
            for each in report["differences"]
        ]
        tables = [table(["run", "item", "where", "in the batch", "alone"], rows)] if rows else []
        output.result(report, _sentence(report), *tables, *(f"note: {note}" for note in report["notes"]))
        if not report["passed"]:
            raise typer.Exit(FAILED_STATUS)


def _sentence(report: dict[str, Any]) -> str:
    name = f"{report['modelName']} {report['modelVersion']}"
    compared = f"{report['answersCompared']} answers, batches of {', '.join(map(str, report['batchSizes']))}"
    if report["passed"]:
        return f"{name}: batches are answered as single requests ({compared})."
    if not report["differencesFound"]:
        return f"{name}: nothing could be compared."
    return f"{name}: {report['differencesFound']} of {compared} differ from those of single requests."


def _read(path: Path) -> tuple[str, bytes, str]:
    try:
        body = path.read_bytes()
    except OSError as error:
        raise WrongArguments(f"Cannot read {path}: {error.strerror}.", "Name a file with --sample.") from error
    return path.name, body, mimetypes.guess_type(path.name)[0] or "application/octet-stream"
