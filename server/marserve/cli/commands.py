"""The commands of `marserve`, in the order in which `marserve --help` lists them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Annotated

import typer

import marserve
from marserve.cli.words import Command

# Each command, and the module that has it. A server starts sooner without what the other commands import.
COMMANDS = {
    "start": "start",
    "stop": "stop",
    "status": "status",
    "archive": "archive",
    "fetch": "fetch",
    "register": "register",
    "models": "models",
    "set-default": "set_default",
    "traffic": "traffic",
    "label": "label",
    "swap": "swap",
    "shadow": "shadow",
    "rollout": "rollout",
    "unregister": "unregister",
    "scale": "scale",
    "tune": "tune",
    "check": "check",
    "plan": "plan",
    "apply": "apply",
    "undo": "undo",
    "history": "undo",
    "watches": "watches",
    "infer": "infer",
    "migrate": "migrate",
    "version": "version",
}


def build_commands(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """`marserve` with these commands, all if not given; only their modules are imported."""
    made = typer.Typer(
        name="marserve",
        help="A model server for PyTorch and ONNX.",
        epilog="Exit status: 0 done, 1 failed, 2 wrong settings or arguments.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_take_flags)
    for name in names:
        module = import_module(f"marserve.cli.{COMMANDS[name]}")
        made.command(name, cls=Command)(getattr(module, name.replace("-", "_")))
    return made


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"marserve {marserve.__version__}")
        raise typer.Exit


def _take_flags(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show marserve's version.")
    ] = False,
) -> None:
    pass
