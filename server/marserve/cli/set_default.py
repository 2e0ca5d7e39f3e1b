"""`marserve set-default`: which version of a model answers requests that name none."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.output import AsJson, Output
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path


def set_default(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[str, typer.Argument(help="The version that is to answer.")],
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a version the one that answers requests which name none."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        answer = server.order("PUT", f"{model_path(model, version)}/set-default")
        output.result({"model": model, "version": version, "status": answer["status"]}, answer["status"])
