"""`torch-model-archiver`: TorchServe's command line for making archives (contract 9.2), with its flags and statuses.

Success is silent, with status 0. Errors are one line `ERROR - …` with status 1, where TorchServe prints a traceback;
usage errors have status 2. It works in a private file beside the archive, never in a folder that another user may own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from marserve.archive.contents.manifest import RUNTIMES
from marserve.archive.writing.writer import (
    FORMATS,
    ArchiveSpec,
    check_export_path,
    output_path,
    plan_archive,
    write_archive,
)
from marserve.cli import Interruptible
from marserve.cli.source_date import read_source_date_epoch
from marserve.errors import CannotArchive


def main(argv: Sequence[str] | None = None) -> int:
    """Make the archive that the arguments (by default this process's) describe; returns the exit status."""
    arguments = build_parser(Path).parse_args(argv)
    try:
        check_export_path(arguments.export_path)
        plan = plan_archive(
            ArchiveSpec(
                arguments.model_name,
                arguments.version,
                arguments.handler,
                arguments.serialized_file,
                arguments.model_file,
                tuple(word.strip() for word in (arguments.extra_files or "").split(",") if word.strip()),
                arguments.requirements_file,
                arguments.config_file,
                arguments.runtime,
            )
        )
        for warning in plan.warnings:
            print(f"WARNING - {warning}", file=sys.stderr)
        output = output_path(arguments.model_name, arguments.export_path, arguments.archive_format)
        if arguments.force and output.exists():
            print(f"WARNING - Overwriting {output} ...", file=sys.stderr)
        with Interruptible():  # it removes what it has not finished
            write_archive(
                plan,
                arguments.export_path,
                archive_format=arguments.archive_format,
                force=arguments.force,
                source_date_epoch=read_source_date_epoch(),
            )
    except CannotArchive as error:
        print(f"ERROR - {error.message}", file=sys.stderr)
        return 1
    return 0


def build_parser(path: Callable[[str], object]) -> argparse.ArgumentParser:
    """The flags; `path` converts a path's text."""
    parser = argparse.ArgumentParser(prog="torch-model-archiver", description="Make a model archive.")
    add = parser.add_argument
    add("--model-name", required=True, help="Name of the model and of the archive.")
    add("-v", "--version", required=True, help="Version of the model; any text.")
    add(
        "--handler",
        required=True,
        help="A built-in handler's name, or the path of a Python file, with or without :function.",
    )
    add("--serialized-file", type=path, help="The model's weights or program (.pt, .pth, .pt2, .onnx, ...).")
    add("--model-file", type=path, help="Python file with the model's class, for a state dict.")
    add("--extra-files", help="Comma-separated files, folders (their contents go to the top) and wildcards.")
    add("--runtime", choices=RUNTIMES, default="python", help="Runtime of the handler (default: python).")
    add(
        "--export-path",
        type=path,
        default=path(os.getcwd()),
        help="Folder for the archive (default: the working directory).",
    )
    add(
        "--archive-format",
        choices=FORMATS,
        default="default",
        help="default and zip-store: .mar; tgz: .tar.gz; no-archive: a folder.",
    )
    add("-f", "--force", action="store_true", help="Overwrite what is there.")
    add("-r", "--requirements-file", type=path, help="The model's own Python requirements.")
    add("-c", "--config-file", type=path, help="The model's configuration (YAML).")
    return parser


if __name__ == "__main__":
    sys.exit(main())
