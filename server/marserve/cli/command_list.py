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
    "start": "server.start",
    "stop": "server.stop",
    "status": "server.status",
    "archive": "local.archive",
    "fetch": "local.fetch",
    "register": "models.register",
    "models": "models.models",
    "set-default": "models.set_default",
    "traffic": "changes.traffic",
    "label": "changes.label",
    "swap": "models.swap",
    "shadow": "changes.shadow",
    "rollout": "changes.rollout",
    "unregister": "models.unregister",
    "scale": "models.scale",
    "tune": "models.tune",
    "check": "models.check",
    "plan": "changes.plan",
    "apply": "changes.apply",
    "undo": "changes.undo",
    "history": "changes.undo",
    "watches": "models.watches",
    "infer": "models.infer",
    "migrate": "torchserve.migrate",
    "version": "local.version",
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
