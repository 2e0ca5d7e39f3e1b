"""`marserve apply`: have the models that a document says, all of them or nothing changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from marserve.cli.changes.plan import DocumentFile, ask_for_plan, named, plan_lines, read_document
from marserve.cli.changes.unnamed import AdoptExisting, AdoptingFile, Prune, read_answer, with_consent
from marserve.cli.dry_run import HEAD, as_dry
from marserve.cli.options import DryRun
from marserve.cli.output import FAILED_STATUS, AsJson, CommandFailed, Output, Step, interrupted_as
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address

PHASES = {"load": "Reading archives", "wait-ready": "Loading models"}


def apply(
    file: DocumentFile = None,
    dry_run: DryRun = False,
    prune: Prune = False,
    adopt_existing: AdoptExisting = False,
    if_digest: Annotated[
        str | None, typer.Option("--if-digest", metavar="DIGEST", help="Only if this is what is in force now.")
    ] = None,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Apply a desired state: new versions load beside, and when all are ready, everything is switched at once."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        answer = read_answer(prune, adopt_existing)
        data = None if file is None else read_document(file)
        if dry_run:
            document = ask_for_plan(server, data, answer)
            output.result(as_dry({**document, "dryRun": True}), HEAD, *plan_lines(document))
            if document.get("problems"):
                raise typer.Exit(FAILED_STATUS)
            return
        headers = {} if if_digest is None else {"if-match": f'"{if_digest}"'}

        def send(parameters: Mapping[str, str]) -> Any:
            adopting = AdoptingFile(file, data) if file and data is not None and "adopt" in parameters else None
            what = "Applying the document"
            outcome = order(server, output, "PUT", "/desired-state", what, data or b"", headers, parameters)
            if adopting is not None and "document" in outcome:
                adopting.write(outcome["document"])
                output.note(f"{file} names {named(outcome['adopted'])} now, too.")
            return outcome

        outcome = with_consent(send, lambda more: ask_for_plan(server, data, more), output, answer, f"{file}")
        output.result(outcome, *outcome_lines(outcome))


def order(
    server: Management,
    output: Output,
    method: str,
    path: str,
    what: str,
    data: bytes = b"",
    headers: Any = None,
    parameters: Mapping[str, str] | None = None,
) -> Any:
    """Send an order that may take as long as models load, show its progress, and return its answer."""

    def look() -> list[Step]:
        under_way = server.order("GET", "/desired-state").get("underWay")
        if under_way is None:
            return [Step(what)]
        return [Step(PHASES.get(under_way["phase"], what), under_way["done"], under_way["of"])]

    try:
        with interrupted_as("It goes on in the server; `marserve history` shows what comes of it."):
            return while_showing(
                lambda: server.order(method, path, parameters, timeout_s=None, content=data, headers=headers or {}),
                look,
                output,
                what,
            )
    except CommandFailed as failure:
        if failure.detail.get("code") == 405:
            raise CommandFailed(failure.message, "enable_model_api=true in the server's settings allows it.") from None
        raise


def outcome_lines(outcome: dict[str, Any]) -> list[Any]:
    """The outcome, for a person."""
    if not outcome["steps"]:
        return ["Nothing to do: the models are as the document says."]
    shown = plan_lines({"isEmpty": False, "steps": outcome["steps"]})
    return [*shown, f"In force after {outcome['seconds']:.1f} s; `marserve undo` goes back."]
