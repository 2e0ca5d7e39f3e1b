"""`marserve logs` and `marserve log-level`: what a server's logs say, what comes, and how much it logs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from marserve.cli.output import AsJson, CommandFailed, Output, WrongArguments
from marserve.cli.remote import ConfigFile, Management, ManagementAddress, find_address
from marserve.names import escaped, json_escaped

# What a record of several lines has.
KEPT = "\n\t"
LEVELS = ("debug", "info", "warning", "error")


def logs(
    model: Annotated[str | None, typer.Argument(help="Lines about this model alone.")] = None,
    request: Annotated[
        str | None, typer.Option("--request", metavar="ID", help="Lines of the request with this id (`x-request-id`).")
    ] = None,
    level: Annotated[
        str | None, typer.Option("--level", help="The least level: debug, info, warning or error.")
    ] = None,
    log: Annotated[
        str | None, typer.Option("--log", help="server, model or access; several with commas. All if not given.")
    ] = None,
    tail: Annotated[int, typer.Option("--tail", metavar="N", help="At most the newest N records.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with the lines that come.")] = False,
    management: ManagementAddress = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest lines of a server's logs: its own, its models' and the access log."""
    _check_level(level, as_json=as_json)
    given = {"model": model, "request": request, "level": level, "log": log, "tail": str(tail)}
    asked = {name: value for name, value in given.items() if value is not None}
    with (
        Output(as_json) as output,
        Management(find_address("management", management, config)) as server,
        _asked_for_logs(),
    ):
        if follow:
            with server.stream("/logs", {**asked, "follow": "true"}) as lines:
                _show_coming(lines, as_json=as_json)
            return
        found = server.order("GET", "/logs", asked)
        if as_json:
            output.result(found)
            return
        for line in found["lines"]:
            _print(_folded(line["text"]))
        if not found["lines"]:
            output.note(_nothing(found, model, request))
        elif not found["complete"]:
            output.note("There are more lines than could be looked through; ask for fewer, or look into the log files.")


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
    _check_level(level, as_json=as_json)
    with (
        Output(as_json) as output,
        Management(find_address("management", management, config)) as server,
        _asked_for_logs(),
    ):
        if level is None:
            levels = server.order("GET", "/logging")
        else:
            asked = {"level": level, **({"model": model} if model else {})}
            levels = server.order("PUT", "/logging", asked)
        own = [f"workers of {name}: {word}" for name, word in levels["models"].items()]
        output.result(levels, f"server log: {levels['level']}", f"workers: {levels['workers']}", *own)


@contextlib.contextmanager
def _asked_for_logs() -> Iterator[None]:
    """Says of a server without the routes which one has none."""
    try:
        yield
    except CommandFailed as failure:
        if failure.detail.get("code") in (404, 405) and failure.detail.get("type") != "ModelNotFoundException":
            raise CommandFailed(
                "This server does not show its logs: it was started as torchserve, and keeps TorchServe's routes.",
                "Its files are model_log.log, ts_log.log and access_log.log in its log_location.",
                **failure.detail,
            ) from failure
        raise


def _nothing(found: dict[str, Any], model: str | None, request: str | None) -> str:
    about = [f"model {model}"] if model else []
    about += [f"request {request}"] if request else []
    sentence = f"No line of the logs is about {' and '.join(about)}." if about else "The logs have no such line."
    return sentence + (f" The oldest line that was looked at is of {found['since']}." if found.get("since") else "")


def _show_coming(lines: Iterator[str], *, as_json: bool) -> None:
    """Print Server-Sent Events as they come, until the server ends. Raises CommandFailed where it breaks off."""
    event = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data" and event == "error":
            raise CommandFailed(str(json.loads(value)["message"]))
        elif name == "data" and event == "end":
            return
        elif name == "data":
            _print(json_escaped(value) if as_json else _folded(json.loads(value)["text"]))
    raise CommandFailed("The server broke the connection off.", "`marserve status` tells whether it still runs.")


def _folded(text: str) -> str:
    """A record of several lines whose first alone has its head (time, level, worker, request), where all have it."""
    first, *rest = text.split("\n")
    head = "".join(first.partition(" - ")[:2])
    if not rest or not all(line.startswith(head) for line in rest):
        return text
    return "\n".join([first, *(f"  {line[len(head) :]}".rstrip() for line in rest)])


def _print(text: str) -> None:
    """A record of a log. The server has escaped what could control a terminal, but this may be another server."""
    sys.stdout.write(f"{escaped(text, keep=KEPT)}\n")
    sys.stdout.flush()


def _check_level(level: str | None, *, as_json: bool) -> None:
    """Leave with the status of wrong arguments for a level that does not exist."""
    if level is not None and level.lower() not in LEVELS:
        with Output(as_json):
            raise WrongArguments(f"The level is {level!r}; it must be one of {', '.join(LEVELS)}.")
