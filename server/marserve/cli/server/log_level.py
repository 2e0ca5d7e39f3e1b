"""`marserve log-level`: shows how much a running server logs, and changes it."""

from __future__ import annotations

from typing import Annotated

import typer

from marserve.cli.output import AsJson, Output, WrongArguments
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address
from marserve.cli.server.logs import LEVELS, asked_for_logs


def log_level(
    level: Annotated[
        str | None, typer.Argument(help="debug, info, warning or error; without one the levels are shown.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only the workers of this model.")] = None,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show or change the level of a server's log and of its workers' logging, until the server ends."""
    if level is not None and level.lower() not in LEVELS:
        with Output(as_json):
            raise WrongArguments(f"The level is {level!r}; it must be one of {', '.join(LEVELS)}.")
    with (
        Output(as_json) as output,
        Management(find_address("management", management, config)) as server,
        asked_for_logs(),
    ):
        if level is None:
            levels = server.order("GET", "/logging")
        else:
            asked = {"level": level, **({"model": model} if model else {})}
            levels = server.order("PUT", "/logging", asked)
        own = [f"workers of {name}: {word}" for name, word in levels["models"].items()]
        output.result(levels, f"server log: {levels['level']}", f"workers: {levels['workers']}", *own)
