"""`marserve scale`: how many workers a model has."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.dry_run import show_dry_run
from marserve.cli.options import DryRun, Version
from marserve.cli.output import AsJson, Output, interrupted_as
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path
from marserve.cli.versions import label, progress_of, ready_workers


def scale(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    workers: Annotated[int, typer.Argument(min=0, help="How many workers it shall have; 0 stops them all.")],
    version: Version = None,
    maximum: Annotated[
        int | None, typer.Option("--max", min=0, help="The most workers it may have; WORKERS if not given.")
    ] = None,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Change how many workers a model has, and wait until they are there."""
    with Output(as_json) as output, Management(find_address("management", management, config)) as server:
        if dry_run:
            asked = {"min_worker": workers, "max_worker": workers if maximum is None else maximum}
            show_dry_run(server, output, "PUT", model_path(model, version), asked)
            return
        # First, so that an unknown name is an error before anything is shown.
        target = server.describe(model, version)[0]
        parameters: dict[str, str | int] = {
            "min_worker": workers,
            "max_worker": workers if maximum is None else maximum,
            "synchronous": "true",
        }
        with interrupted_as(
            f"The scaling of {label(target)} goes on in the server; `marserve models {model}` shows how far it is."
        ):
            answer = while_showing(
                lambda: server.order("PUT", model_path(model, version), parameters, timeout_s=None),
                lambda: [progress_of(server.describe(model, version)[0])],
                output,
                f"Scaling {label(target)} to {workers} workers",
            )
        described = server.describe(model, version)[0]
        output.result(
            {
                "model": described["modelName"],
                "version": described["modelVersion"],
                "minWorkers": described["minWorkers"],
                "maxWorkers": described["maxWorkers"],
                "readyWorkers": ready_workers(described),
                "status": answer["status"],
            },
            answer["status"],
        )
