"""`torch-workflow-archiver`: TorchServe's command line for making workflow archives (contract 9.3).

Success is silent, with status 0. Errors are one line `ERROR - …` with status 1; usage errors have status 2. A spec that
servers would refuse is a warning, and the archive is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from marserve.archive.writing.workflow_writer import WorkflowArchiveSpec, workflow_output_path, write_workflow_archive
from marserve.archive.writing.writer import check_export_path
from marserve.cli import Interruptible
from marserve.cli.source_date import read_source_date_epoch
from marserve.errors import BadWorkflow, CannotArchive
from marserve.workflows.functions import missing_functions
from marserve.workflows.spec import parse_spec


def main(argv: Sequence[str] | None = None) -> int:
    """Make the archive that the arguments (by default this process's) describe; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        with Interruptible():  # it removes what it has not finished
            warnings = _make(arguments)
    except CannotArchive as error:
        print(f"ERROR - {error.message}", file=sys.stderr)
        return 1
    for warning in warnings:
        print(f"WARNING - {warning}", file=sys.stderr)
    return 0


def _make(arguments: argparse.Namespace) -> list[str]:
    if arguments.handler is None:
        raise CannotArchive(
            "No handler is named. Name the Python file with the workflow's functions with --handler; one without "
            "functions will do where every node is a model."
        )
    check_export_path(arguments.export_path)
    output = workflow_output_path(arguments.workflow_name, arguments.export_path)
    overwrites = arguments.force and output.exists()
    _, warnings = write_workflow_archive(
        WorkflowArchiveSpec(
            arguments.workflow_name,
            arguments.spec_file,
            arguments.handler,
            tuple(word.strip() for word in (arguments.extra_files or "").split(",") if word.strip()),
        ),
        arguments.export_path,
        force=arguments.force,
        source_date_epoch=read_source_date_epoch(),
    )
    if overwrites:
        warnings = [f"Overwrote {output}", *warnings]
    try:
        spec = parse_spec(arguments.spec_file.read_bytes(), arguments.spec_file.name)
        warnings += spec.warnings
        functions = [node.name for node in spec.nodes.values() if node.is_function]
        missing = ", ".join(missing_functions(functions, arguments.handler.read_bytes()))
        if missing:
            warnings.append(
                f"servers will refuse this workflow: {missing} of {arguments.spec_file.name} is neither a model nor a "
                f"function of {arguments.handler.name}"
            )
    except BadWorkflow as error:
        reason = f" ({error.reason})" if error.reason else ""
        warnings.append(f"servers will refuse this workflow: {error.message}{reason}")
    return warnings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torch-workflow-archiver", description="Make a workflow archive.")
    add = parser.add_argument
    add("--workflow-name", required=True, help="Name of the workflow and of the archive.")
    add("--spec-file", required=True, type=Path, help="The workflow's spec (YAML): its models and its graph.")
    add("--handler", type=Path, help="The Python file with the functions of the graph.")
    add("--extra-files", help="Comma-separated files, folders (their contents go to the top) and wildcards.")
    add("--export-path", type=Path, default=Path.cwd(), help="Folder for the archive (default: the working directory).")
    add("-f", "--force", action="store_true", help="Overwrite what is there.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
