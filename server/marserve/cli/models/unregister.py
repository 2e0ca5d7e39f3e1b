"""`marserve unregister`: takes a model, or one version of it, out of a running server."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.dry_run import show_dry_run
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, Output, interrupted_as
from marserve.cli.progress.wait_progress import while_showing
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
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Take a model's version out of the server and end its workers; of archives the store loses only fetched ones."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        parameters = {"force": "true"} if force else None
        path = model_path(model, version)
        if dry_run:
            show_dry_run(server, output, "DELETE", path, parameters)
            return
        named = f"{model}/{version}" if version else model
        with interrupted_as(f"{named} goes on being unregistered; no new request finds it."):
            answer = while_showing(
                lambda: server.order("DELETE", path, parameters, timeout_s=LIMIT_S),
                list,
                output,
                f"Unregistering {named}: accepted requests are answered first",
            )
        status = answer["status"]
        # TorchServe's sentence names the model alone, of which other versions may stay.
        said = f"Version {version} of model {model} unregistered" if version else status
        output.result({"model": model, "version": version, "status": status}, said)
