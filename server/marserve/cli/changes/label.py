"""`marserve label`: further names of a model's versions, such as `stable` and `canary`."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from marserve.cli.dry_run import as_dry, query
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, Output, table
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path


def label(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[LABEL]", help="The label; all are shown if not given.")
    ] = None,
    version: Annotated[str | None, typer.Argument(metavar="[VERSION]", help="The version that it is to name.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Let the label name nothing any more.")] = False,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show, set or remove labels of a model's versions."""
    if remove and (name is None or version is not None):
        raise typer.BadParameter("it needs a label and no version: marserve label MODEL LABEL --remove")
    if dry_run and version is None and not remove:
        raise typer.BadParameter("it needs something to do: a version, or --remove", param_hint="--dry-run")
    parameters = query(dry_run)
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        path = f"{model_path(model)}/labels"
        if name is not None and remove:
            described = server.order("DELETE", f"{path}/{quote(name, safe='')}", parameters)
            document = {"model": model, "label": name, **described}
            output.result(as_dry(document) if dry_run else document, described["status"])
        elif name is not None and version is not None:
            described = server.order("PUT", f"{path}/{quote(name, safe='')}", parameters, json={"version": version})
            verb = "would name" if dry_run else "names"
            document = {"model": model, "label": name, **described}
            output.result(as_dry(document) if dry_run else document, f"{name} {verb} {_names(described)}")
        else:
            labels = server.order("GET", path)
            if name is not None:
                labels = {word: described for word, described in labels.items() if word == name}
            rows = [[word, _names(described)] for word, described in labels.items()]
            none = f"Model {model} has no label{f' {name}' if name else 's'}."
            output.result({"model": model, "labels": labels}, table(["label", "version"], rows) if rows else none)


def _names(described: dict[str, Any]) -> str:
    if not described.get("isPending"):
        return str(described["version"])
    meanwhile = f", {described['answeredBy']} until then" if "answeredBy" in described else ""
    return f"{described['version']} (not ready{meanwhile})"
