"""The commands of `marserve`, in the order in which `marserve --help` lists them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

import marserve
from marserve.cli.words import Command, Commands

# Each command and its module. Only the module of the called command is imported, so that a server starts sooner.
COMMANDS = {
    "run": "run.command",
    "new": "local.new",
    "start": "server.start",
    "stop": "server.stop",
    "status": "server.status",
    "archive": "local.archive",
    "compare": "local.compare",
    "optimise": "local.optimise",
    "export": "local.export",
    "debug": "local.debug",
    "fetch": "local.fetch",
    "register": "models.register",
    "models": "models.models",
    "top": "top.command",
    "set-default": "models.set_default",
    "traffic": "changes.traffic",
    "label": "changes.label",
    "swap": "models.swap",
    "shadow": "changes.shadow",
    "rollout": "changes.rollout",
    "unregister": "models.unregister",
    "scale": "models.scale",
    "bench": "measuring.bench",
    "tune": "measuring.tune",
    "check": "models.check",
    "profile": "measuring.profile",
    "plan": "changes.plan",
    "apply": "changes.apply",
    "undo": "changes.undo",
    "history": "changes.undo",
    "watches": "models.watches",
    "logs": "server.logs",
    "log-level": "server.logs",
    "explain": "requests.explain",
    "replay": "requests.replay",
    "infer": "models.infer",
    "migrate": "torchserve.migrate",
    "version": "local.version",
}


def build_commands(names: Iterable[str] = COMMANDS, *, are_listed_only: bool = False) -> typer.Typer:
    """`marserve` with these commands, by default all; only their modules are imported.

    With `are_listed_only` no module is imported: the commands have their docstrings, and cannot be run.
    """
    made = typer.Typer(
        name="marserve",
        cls=Commands,
        help="A model server for PyTorch and ONNX.",
        epilog="Exit status: 0 done, 1 failed, 2 wrong settings or arguments, 3 of optimise: the parent stays.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_take_flags)
    for name in names:
        find = _listed if are_listed_only else _imported
        made.command(name, cls=Command)(find(f"marserve.cli.{COMMANDS[name]}", name.replace("-", "_")))
    return made


def _imported(module: str, name: str) -> Callable[..., object]:
    found: Callable[..., object] = getattr(import_module(module), name)
    return found


def _listed(module: str, name: str) -> Callable[..., object]:
    """A function with the docstring of the command in the module's source; the command itself if there is no source."""
    spec = find_spec(module)
    source = getattr(spec.loader, "get_source", lambda module: None)(module) if spec is not None else None
    if source is None:
        return _imported(module, name)

    def command() -> None:
        raise AssertionError("a command that is listed only is not run")

    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    command.__doc__ = next(ast.get_docstring(node) for node in functions if node.name == name)
    return command


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
