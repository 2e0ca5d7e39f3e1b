"""`marserve unregister`: takes a model, or one version of it, out of a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.output import AsJson, Output
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path

# Its workers are ended first, and the server bounds how long that may take (unregister_model_timeout).
LIMIT_S = 600.0


def unregister(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[
        str | None, typer.Option("--version", help="The version; may be left out where there is only one.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also a version that has a weight or a label, and these with it.")
    ] = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Take a model's version out of the server and end its workers; the archive stays in the store."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        parameters = {"force": "true"} if force else None
        answer = server.order("DELETE", model_path(model, version), parameters, timeout_s=LIMIT_S)
        output.result({"model": model, "version": version, "status": answer["status"]}, answer["status"])
