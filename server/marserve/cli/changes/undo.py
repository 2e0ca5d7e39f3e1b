"""`marserve undo` and `marserve history`: back to the document before the one in force, and which those are."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from marserve.cli.changes.apply import order, outcome_lines
from marserve.cli.changes.plan import PLAN_LIMIT_S, plan_lines
from marserve.cli.changes.unnamed import AdoptExisting, Prune, read_answer, with_consent
from marserve.cli.dry_run import HEAD, as_dry
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, Output, table
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address


def undo(
    dry_run: DryRun = False,
    prune: Prune = False,
    adopt_existing: AdoptExisting = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Go back to the desired state before the one in force. Once more goes back once more."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        answer = read_answer(prune, adopt_existing)

        def plan(parameters: Mapping[str, str]) -> dict[str, Any]:
            asked = {**parameters, "dry_run": "true"}
            found: dict[str, Any] = server.order("POST", "/desired-state/undo", asked, timeout_s=PLAN_LIMIT_S)
            return found

        def send(parameters: Mapping[str, str]) -> Any:
            return order(server, output, "POST", "/desired-state/undo", "Going back", parameters=parameters)

        if dry_run:
            document = plan(answer)
            output.result(as_dry({**document, "dryRun": True}), HEAD, *plan_lines(document))
            return
        outcome = with_consent(send, plan, output, answer, "Going back")
        output.result(outcome, *outcome_lines(outcome))


def history(
    number: Annotated[
        int | None, typer.Argument(metavar="[NUMBER]", help="Print this entry's document; all entries if not given.")
    ] = None,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """List the desired states that were applied, newest first, or print the document of one."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        if number is not None:
            entry = server.order("GET", f"/desired-state/history/{number}")
            output.result(entry, entry["document"].rstrip("\n"))
            return
        document = server.order("GET", "/desired-state/history")
        rows = [
            [
                ("* " if entry["isCurrent"] else "  ") + str(entry["number"]),
                datetime.fromtimestamp(entry["at"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
                entry["by"],
                entry["digest"][:12],
                entry["what"],
            ]
            for entry in document["history"]
        ]
        columns = ["  number", "at (UTC)", "by", "digest", "what"]
        output.result(document, table(columns, rows) if rows else "No desired state was applied yet.")
