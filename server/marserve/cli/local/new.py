"""`marserve new`: a folder with a model that answers, its test and a request, to begin with."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from marserve.archive.writing.writer import check_name
from marserve.cli.local.templates import TEMPLATES, files_of
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, CommandFailed, Output, WrongArguments
from marserve.errors import CannotArchive
from marserve.files.atomic import placing

TemplateName = StrEnum("TemplateName", {word: word for word in TEMPLATES})  # type: ignore[misc]  # from one list


def new(
    name: Annotated[str, typer.Argument(help="The folder to make; its name is the model's.")] = "my_model",
    template: Annotated[
        TemplateName,
        typer.Option("--template", "-t", help="What it takes: named tensors, a picture, JSON, a prompt; or ONNX."),
    ] = TemplateName("tensor"),
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make a folder with a small model that answers, its test, a request and its configuration."""
    with Output(as_json) as output:
        folder = Path(name)
        try:
            check_name("model", folder.name)
        except CannotArchive as error:
            raise WrongArguments(error.message) from error
        if os.path.lexists(folder):
            raise CommandFailed(f"There is {folder} already, and nothing in it is overwritten.", "Name another folder.")
        if not folder.absolute().parent.is_dir():
            raise CommandFailed(f"{folder} cannot be made: there is no folder {folder.parent}. Create that first.")
        files = files_of(template.value, folder.name)
        if not dry_run:
            _write(folder, files)
        document = {"folder": str(folder), "template": template.value, "files": list(files), "isDryRun": dry_run}
        would = "would be made with" if dry_run else "with"
        output.result(
            document,
            f"{folder} {would} {', '.join(files)}",
            f"Serve it with `marserve run {folder}`, and change it while it runs with --reload.",
        )


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Make the folder whole or not at all. Raises CommandFailed."""
    try:
        with placing(folder) as partial:
            partial.mkdir()
            for name, content in files.items():
                (partial / name).write_bytes(content)
    except OSError as error:
        raise CommandFailed(f"{folder} cannot be written ({error.strerror or error}).") from error
