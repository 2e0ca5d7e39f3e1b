"""`marserve models`: the registered models, their versions, workers and last deaths."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.output import AsJson, Output
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address
from marserve.cli.versions import versions_table, workers_table


def models(
    model: Annotated[str | None, typer.Argument(help="Show this model alone, with its workers.")] = None,
    version: Annotated[str, typer.Option("--version", help="Show this version alone.")] = "all",
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show registered models, their versions and workers."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        if model is None:
            described = server.describe_all()
            output.result(described, versions_table(described) if described else "No model is registered.")
        else:
            described = server.describe(model, version)
            output.result(described, versions_table(described), "", workers_table(described))
