"""`marserve migrate triton`: archives and settings of a model repository of Triton's, and what became of each field."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from marserve.app.trial import try_start
from marserve.cli.dry_run import HEAD, as_dry
from marserve.cli.output import FAILED_STATUS, CommandFailed, Output, WrongArguments
from marserve.cli.source_date import read_source_date_epoch
from marserve.cli.torchserve.finding_lines import lines_of
from marserve.errors import CannotArchive, without_stop
from marserve.migration.findings import as_document, counts, in_order
from marserve.migration.triton.importing import Import, check_output, judge_import, plan_import, write_import

EXPORT_PATH = Path("migrated")


def import_repository(
    output: Output, repository: Path, export_path: Path | None, *, force: bool, is_dry: bool, show_all: bool
) -> None:
    """Import a repository and show the findings; exit status 1 if something needs action.

    The folder is written as soon as one version can be imported, without those that cannot.
    """
    target = export_path or EXPORT_PATH
    try:
        planned = plan_import(repository)
    except NotADirectoryError as error:
        raise WrongArguments(
            f"{without_stop(error)}.", "Name the folder that tritonserver has as --model-repository."
        ) from error
    try:
        check_output(target, planned.root, force=force)
    except CannotArchive as error:
        raise WrongArguments(error.message) from error
    findings = list(planned.findings)
    if planned.versions and not is_dry:
        _write(output, planned, target)
        findings = in_order([*findings, *judge_import(target, os.environ, try_start, str(target))])
    number = counts(findings)
    document: dict[str, Any] = {
        "folder": str(repository),
        "output": str(target) if planned.versions else None,
        "archives": [
            {"archive": each.archive, "model": each.model, "version": str(each.number)} for each in planned.versions
        ],
        "counts": number,
        "findings": as_document(findings),
    }
    lines = [*lines_of(findings, repository, show_all=show_all), _ending(planned, target, is_dry=is_dry)]
    if is_dry:
        output.result(as_dry(document), HEAD, *lines)
    else:
        output.result(document, *lines)
    if number["action"]:
        raise typer.Exit(FAILED_STATUS)


def _write(output: Output, planned: Import, target: Path) -> None:
    try:
        with output.progress() as progress:
            task = progress.add_task(f"Writing {target}", total=planned.total_bytes)
            write_import(
                planned,
                target,
                source_date_epoch=read_source_date_epoch(),
                on_bytes=lambda count: progress.advance(task, count),
            )
    except CannotArchive as error:
        raise CommandFailed(error.message) from error


def _ending(planned: Import, target: Path, *, is_dry: bool) -> str:
    count = len(planned.versions)
    if not count:
        return "No model can be imported; nothing was written."
    models = len({each.model for each in planned.versions})
    archives = f"{target}: {count} archive{'s' * (count > 1)} of {models} model{'s' * (models > 1)}"
    return f"{archives} would be written." if is_dry else f"{archives}. `marserve start` in this folder serves them."
