"""`marserve models`: the registered models, their versions, workers and last deaths."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.output import AsJson, Output
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address
from marserve.cli.versions import (
    arrivals,
    deaths,
    failed_certificates,
    last_words,
    remarks,
    versions_table,
    waiting_workers,
    worker_deaths,
    workers_table,
)


def models(
    model: Annotated[str | None, typer.Argument(help="Show this model alone, with its workers.")] = None,
    version: Annotated[
        str | None, typer.Option("--version", help="Show this version of MODEL alone; all if not given.")
    ] = None,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show registered models, their versions and workers."""
    if model is None and version is not None:
        raise typer.BadParameter("it needs a model: marserve models MODEL --version VERSION", param_hint="--version")
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        if model is None:
            described = server.describe_all()
            output.result(
                described,
                versions_table(described) if described else "No model is registered.",
                *arrivals(described),
                *waiting_workers(described),
                *deaths(described),
                *failed_certificates(described),
                *remarks(described),
            )
        else:
            described = server.describe(model, version or "all")
            output.result(
                described,
                versions_table(described),
                "",
                workers_table(described),
                *arrivals(described),
                *waiting_workers(described),
                *failed_certificates(described),
                *remarks(described),
                *worker_deaths(described),
                *last_words(described),
            )
