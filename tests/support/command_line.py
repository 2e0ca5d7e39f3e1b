"""Runs `marserve` commands inside the test's own process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import typer.main
from click.testing import CliRunner

from marserve.cli.command_list import build_commands

COMMANDS = typer.main.get_command(build_commands())


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str
    out_bytes: bytes

    @property
    def document(self) -> Any:
        """The JSON that it printed."""
        return json.loads(self.out)


def marserve(*arguments: object, stdin: bytes = b"") -> Ran:
    """Run `marserve ARGUMENTS…`; an error that is no refusal is raised here."""
    result = CliRunner().invoke(COMMANDS, [str(argument) for argument in arguments], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr, result.stdout_bytes)
