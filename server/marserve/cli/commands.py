"""The commands of `marserve`, in the order in which `marserve --help` lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import marserve
from marserve.cli.apply import apply
from marserve.cli.archive import archive
from marserve.cli.check import check
from marserve.cli.fetch import fetch
from marserve.cli.infer import infer
from marserve.cli.label import label
from marserve.cli.migrate import migrate
from marserve.cli.models import models
from marserve.cli.plan import plan
from marserve.cli.register import register
from marserve.cli.rollout import rollout
from marserve.cli.scale import scale
from marserve.cli.set_default import set_default
from marserve.cli.shadow import shadow
from marserve.cli.start import start
from marserve.cli.status import status
from marserve.cli.stop import stop
from marserve.cli.swap import swap
from marserve.cli.traffic import traffic
from marserve.cli.tune import tune
from marserve.cli.undo import history, undo
from marserve.cli.unregister import unregister
from marserve.cli.version import version
from marserve.cli.watches import watches

commands = typer.Typer(
    name="marserve",
    help="A model server for PyTorch and ONNX.",
    epilog="Exit status: 0 done, 1 failed, 2 wrong settings or arguments.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"marserve {marserve.__version__}")
        raise typer.Exit


@commands.callback()
def _take_flags(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show marserve's version.")
    ] = False,
) -> None:
    pass


_COMMANDS: tuple[Callable[..., None], ...] = (
    start,
    stop,
    status,
    archive,
    fetch,
    register,
    models,
    set_default,
    traffic,
    label,
    swap,
    shadow,
    rollout,
    unregister,
    scale,
    tune,
    check,
    plan,
    apply,
    undo,
    history,
    watches,
    infer,
    migrate,
    version,
)
for command in _COMMANDS:
    commands.command()(command)
