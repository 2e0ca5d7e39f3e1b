"""`marserve plan`: what a desired state would change on a running server, and what that takes. Changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from marserve.cli.output import FAILED_STATUS, AsJson, CommandFailed, Output, WrongArguments, table
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address
from marserve.desired_state.diff import compare
from marserve.desired_state.document import read
from marserve.desired_state.schema import schema
from marserve.errors import BadDesiredState, some_of

PLAN_LIMIT_S = 120.0
DocumentFile = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="The document; the one that the server was started with if not given."),
]


def plan(
    file: DocumentFile = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Ask no server: check the document, and compare it with no models at all.")
    ] = False,
    show_schema: Annotated[
        bool, typer.Option("--schema", help="Print the document's JSON Schema, for editors.")
    ] = False,
    is_estimate: Annotated[
        bool,
        typer.Option(
            "--estimate",
            help="FILE is an archive, or the folder of a checkpoint: say what memory its weights take on each rank, "
            "by their headers. Asks no server.",
        ),
    ] = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what applying a desired state would change, step by step, and what it takes in memory."""
    with Output(as_json) as output:
        if is_estimate:
            if file is None or offline or show_schema:
                raise WrongArguments(
                    "--estimate is of one archive or folder, and goes with no other option but --json.",
                    "`marserve plan model.mar --estimate` looks at an archive.",
                )
            # here: a plan needs no archives read
            from marserve.cli.changes.estimate import estimate_lines, estimate_memory

            estimated = estimate_memory(file)
            output.result(estimated, *estimate_lines(estimated))
            if estimated["problems"]:
                raise typer.Exit(FAILED_STATUS)
            return
        if show_schema:
            typer.echo(_pretty(schema()))
            return
        data = None if file is None else read_document(file)
        if offline:
            if data is None or file is None:
                raise WrongArguments("There is nothing to plan.", "Name a document: `marserve plan FILE --offline`.")
            steps = [step.document() for step in compare({}, read(data, str(file))).steps]
            document: dict[str, Any] = {"isEmpty": not steps, "steps": steps}
        else:
            with Management(find_address("management", management, config)) as server:
                document = ask_for_plan(server, data)
        output.result(document, *plan_lines(document))
        if document.get("problems"):
            raise typer.Exit(FAILED_STATUS)


def read_document(file: Path) -> bytes:
    """The text of a checked document. Raises CommandFailed with each line that is wrong."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise WrongArguments(f"{file} cannot be read ({error.strerror}).") from error
    try:
        read(data, str(file))
    except BadDesiredState as error:
        lines = [f"{file} is refused:", *(f"  {problem}" for problem in error.problems)]
        raise CommandFailed("\n".join(lines), "`marserve plan --schema` prints what may stand there.") from error
    return data


def ask_for_plan(server: Management, data: bytes | None, parameters: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A server's plan for a document; for the one that it was started with if `data` is None."""
    found: dict[str, Any] = server.order(
        "POST", "/desired-state/plan", parameters, timeout_s=PLAN_LIMIT_S, content=data or b""
    )
    return found


def plan_lines(document: dict[str, Any]) -> list[str | Table]:
    """The plan for a person."""
    if document["isEmpty"]:
        return ["Nothing to do: the models are as the document says.", *_unnamed_lines(document)]
    rows = [
        [
            step["step"],
            step["model"],
            step.get("version", ""),
            _bytes(step.get("memoryBytes")),
            step.get("detail", ""),
        ]
        for step in document["steps"]
        if step["step"] not in ("wait-ready", "switch")
    ]
    lines: list[str | Table] = [table(["step", "model", "version", "memory", "what"], rows)]
    memory = document.get("memoryBytes") or {}
    if memory.get("atMost"):
        after = memory.get("afterwards")
        later = "" if after is None else f", {_bytes(after) or '0 B'} once what goes has gone"
        window = document.get("undoWindow")
        lasts = "" if window is None else f" ({window:g} s, for undo)"
        lines.append(f"Estimated memory: {_bytes(memory['atMost'])} more while old and new are there{lasts}{later}.")
    return [*lines, *_unnamed_lines(document), *_problem_lines(document)]


def _problem_lines(document: Mapping[str, Any]) -> list[str]:
    """Archives that are missing: with any, applying would end with status 1, and so does the plan."""
    problems = document.get("problems")
    return ["Applying it would fail:", *(f"  {problem}" for problem in problems)] if problems else []


def named(versions: Sequence[Mapping[str, str]]) -> str:
    """Versions for a sentence: `m 1.0, n 1.0 and 3 more`."""
    return some_of([f"{each['model']} {each['version']}" for each in versions])


def _unnamed_lines(document: Mapping[str, Any]) -> list[str]:
    """The versions that no document has named so far, about which the user must decide first."""
    lines = []
    if adopted := document.get("adopted"):
        lines.append(f"Added to the document, and unchanged: {named(adopted)}.")
    if unnamed := document.get("unnamed"):
        lines.append(
            f"Calls brought {named(unnamed)}, and no document names them: `marserve apply` asks before it unloads them "
            "(--prune), or adds them to the document (--adopt-existing)."
        )
    return lines


def _bytes(count: int | None) -> str:
    """Bytes for a person, with a sign."""
    if count is None:
        return ""
    size, sign = float(abs(count)), "-" if count < 0 else "+"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{sign}{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{sign}{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _pretty(document: Any) -> str:
    return json.dumps(document, indent=2)
