"""`marserve set-default`: which version of a model answers requests that name none."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.dry_run import show_dry_run
from marserve.cli.options import DryRun
from marserve.cli.output import AsJson, Output
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path


def set_default(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    version: Annotated[str, typer.Argument(help="The version that is to answer.")],
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a version the one that answers requests which name none."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        path = f"{model_path(model, version)}/set-default"
        if dry_run:
            show_dry_run(server, output, "PUT", path)
            return
        # If the server adopts it into its desired state, it waits for a change of that which is under way.
        answer = while_showing(
            lambda: server.order("PUT", path, timeout_s=None), list, output, f"Making {model}/{version} the default"
        )
        output.result({"model": model, "version": version, "status": answer["status"]}, answer["status"])
