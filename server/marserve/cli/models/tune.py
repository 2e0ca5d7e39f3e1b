"""`marserve tune`: how a model's batches are formed, from now on and without a restart."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.dry_run import show_dry_run
from marserve.cli.options import BatchSize, DryRun, MaxBatchDelay, Version
from marserve.cli.output import AsJson, Output, WrongArguments
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address, model_path


def tune(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    batch_size: BatchSize = None,
    max_batch_delay: MaxBatchDelay = None,
    version: Version = None,
    dry_run: DryRun = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Change batch size and batch delay of a running model at once; registering it again brings the old ones back."""
    with Output(as_json) as output:
        given = {"batch_size": batch_size, "max_batch_delay": max_batch_delay}
        parameters = {name: value for name, value in given.items() if value is not None}
        if not parameters:
            raise WrongArguments("Nothing was changed.", "Say what to change: --batch-size or --max-batch-delay.")
        with Management(find_address("management", management, config)) as server:
            path = model_path(model, version)
            if dry_run:
                show_dry_run(server, output, "PUT", path, parameters)
                return
            answer = while_showing(
                lambda: server.order("PUT", path, parameters, timeout_s=None), list, output, f"Tuning {model}"
            )
            described = server.describe(model, version)[0]
        output.result(
            {
                "model": described["modelName"],
                "version": described["modelVersion"],
                "batchSize": described["batchSize"],
                "maxBatchDelay": described["maxBatchDelay"],
                "status": answer["status"],
            },
            answer["status"],
        )
