"""`marserve tune`: how a model's batches are formed, from now on and without a restart; or which way is the best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from marserve.cli import Tidied
from marserve.cli.dry_run import show_dry_run
from marserve.cli.options import BatchSize, DryRun, MaxBatchDelay, Version
from marserve.cli.output import AsJson, Output, WrongArguments
from marserve.cli.progress.wait_progress import while_showing
from marserve.cli.remote import (
    ConfigFile,
    InferenceAddress,
    Management,
    ManagementAddress,
    find_address,
    model_path,
)


def tune(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    batch_size: BatchSize = None,
    max_batch_delay: MaxBatchDelay = None,
    version: Version = None,
    dry_run: DryRun = False,
    goal: Annotated[
        str | None,
        typer.Option(help="Find the options with the highest rate: rate, or p99=50ms for that within a time."),
    ] = None,
    within: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="How long --goal may measure, such as 90s; 5m.")
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option("--inputs", metavar="DIR|FILE", help="Request bodies for --goal; what the model declares else."),
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Numbers of workers to try; up to the processors if not given.")
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="1,2,4", help="Threads of each worker to try; up to the processors likewise.")
    ] = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(metavar="VERSION", help="Try this version, too, repeatable; VERSION-optimised if not given."),
    ] = None,
    on_live: Annotated[
        bool, typer.Option("--on-live", help="Load the version that serves clients, and no copy of it.")
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Set what --goal found, if it is better.")] = False,
    model_config: Annotated[
        Path | None, typer.Option("--model-config", metavar="FILE", help="The archive's, which the patch shall fit.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--page", metavar="FILE", help="Write what --goal found as an HTML page, too.")
    ] = None,
    inference: InferenceAddress = None,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Change batch size and delay of a running model at once, or find the best for a goal; an archive keeps its own."""
    with Output(as_json) as output:
        given = {"batch_size": batch_size, "max_batch_delay": max_batch_delay}
        parameters = {name: value for name, value in given.items() if value is not None}
        of_search = {
            "--for": within,
            "--inputs": inputs,
            "--workers": workers,
            "--threads": threads,
            "--candidate": candidate,
            "--on-live": on_live,
            "--apply": apply,
            "--model-config": model_config,
            "--page": page,
        }
        if goal is None and (without := [flag for flag, value in of_search.items() if value]):
            raise WrongArguments(f"{without[0]} is for a search.", "Say what for: --goal rate, or --goal p99=50ms.")
        if goal is not None and (parameters or dry_run):
            raise WrongArguments(
                "--goal finds what the other options set; it changes nothing without --apply.",
                "Leave out --batch-size, --max-batch-delay and --dry-run.",
            )
        if goal is None and not parameters:
            raise WrongArguments(
                "Nothing was changed.", "Say what to change: --batch-size or --max-batch-delay; or --goal to search."
            )
        with Management(find_address("management", management, config)) as server:
            if goal is not None:
                # Here, for the time of other commands.
                from marserve.cli.measuring.load_target import find_place
                from marserve.cli.measuring.tune_search import tune_for
                from marserve.cli.measuring.tune_space import Wish

                wish = Wish(
                    model,
                    version,
                    goal,
                    within or "5m",
                    inputs,
                    workers,
                    threads,
                    candidate or (),
                    on_live,
                    apply,
                    page,
                    model_config,
                )
                with Tidied():
                    tune_for(wish, server, find_place(inference, config), output)
                return
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
