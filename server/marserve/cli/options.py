"""Options that several commands share. Those that set an option of a model have its sentence."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from marserve.cli.output import WrongArguments
from marserve.model_options import BY_KEY

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)").fullmatch
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be; nothing is changed.")]
Version = Annotated[str | None, typer.Option("--version", help="The version; the default one if not given.")]
Handler = Annotated[str | None, typer.Option("--handler", help="Use this handler, not the archive's.")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help=BY_KEY["batchSize"].help)]
MaxBatchDelay = Annotated[int | None, typer.Option("--max-batch-delay", min=0, help=BY_KEY["maxBatchDelay"].help)]
ResponseTimeout = Annotated[int | None, typer.Option("--response-timeout", min=1, help=BY_KEY["responseTimeout"].help)]
StartupTimeout = Annotated[int | None, typer.Option("--startup-timeout", min=1, help=BY_KEY["startupTimeout"].help)]
Memory = Annotated[str | None, typer.Option("--memory", help=BY_KEY["memory"].help)]
Pinned = Annotated[bool, typer.Option("--pinned", help=BY_KEY["pinned"].help)]
Upload = Annotated[
    bool | None,
    typer.Option("--upload/--no-upload", help="Send the file to the server, or leave the name to the server."),
]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Let the file take the place of another one of its name that no version uses."),
]
Trust = Annotated[bool, typer.Option("--trust", help="Load native code, and pickles that may run anything.")]
ModelThreads = Annotated[int, typer.Option("--threads", min=1, max=1024, help="Threads that each model may use.")]
SentAs = Annotated[str | None, typer.Option("--as", metavar="NAME", help="Send the file under this name.")]


def read_seconds(flag: str, word: str | None) -> float | None:
    """A time as it is typed, in seconds: `60s`, `500ms`, `5m`. Raises WrongArguments."""
    if word is None:
        return None
    found = _DURATION(word.strip())
    if found is None:
        raise WrongArguments(f"{flag} is {word!r}, which is no time.", "60s, 500ms, 5m and 1h are.")
    return float(found[1]) * _UNITS[found[2]]
