"""`marserve watches`: the places that a server watches, what became of the archives there, and looking now."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from marserve.cli.output import AsJson, Output, table
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address


def watches(
    name: Annotated[str | None, typer.Argument(help="Show this watch alone, with its archives.")] = None,
    look: Annotated[bool, typer.Option("--look", help="Look at the place now; without a name at all of them.")] = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show watched stores and folders, and what became of what appeared there."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        if look:
            names = [name] if name else [each["name"] for each in server.order("GET", "/watches")["watches"]]
            looked = [server.order("POST", f"/watches/{quote(each, safe='')}/look") for each in names]
            output.result(
                {"looked": names}, *(each["status"] for each in looked) if looked else ("Nothing is watched.",)
            )
            return
        if name is None:
            listed = server.order("GET", "/watches")
            output.result(listed, _overview(listed["watches"]) if listed["watches"] else "Nothing is watched.")
            return
        described = server.order("GET", f"/watches/{quote(name, safe='')}")
        archives = described["archiveList"]
        output.result(
            described,
            _overview([described]),
            *_remarks(described),
            "",
            _archives(archives) if archives else "No archive is known yet.",
        )


def _overview(listed: list[dict[str, Any]]) -> Any:
    rows = [
        [
            each["name"],
            each["policy"],
            str(each["archives"]),
            ", ".join(f"{count} {state}" for state, count in sorted(each["states"].items())) or "-",
            each["lastSuccess"] or "never",
            "yes" if each["reachable"] else (each["lastError"] or {}).get("reason", "not yet"),
            each["place"],
        ]
        for each in listed
    ]
    return table(["watch", "policy", "archives", "of them", "last answer", "reachable", "place"], rows)


def _remarks(described: dict[str, Any]) -> list[str]:
    """Reasons why an archive may not have appeared."""
    notices = [f"The system tells of no changes: {described['noNotices']}"] if described.get("noNotices") else []
    return [*notices, *(f"Not finished: {each['key']}: {each['reason']}" for each in described["unfinished"])]


def _archives(archives: list[dict[str, Any]]) -> Any:
    rows = [
        [
            each["key"],
            each["state"],
            f"{each['modelName']} {each['modelVersion']}" if each.get("modelName") else "-",
            each["at"],
            each.get("reason", ""),
        ]
        for each in archives
    ]
    return table(["archive", "state", "model", "since", "reason"], rows)
