"""The commands of `marserve`, in the order in which `marserve --help` lists them."""

from __future__ import annotations

import typer

from marserve.cli.archive import archive
from marserve.cli.infer import infer
from marserve.cli.models import models
from marserve.cli.register import register
from marserve.cli.scale import scale
from marserve.cli.start import start
from marserve.cli.status import status
from marserve.cli.stop import stop
from marserve.cli.version import version

commands = typer.Typer(
    name="marserve",
    help="A model server for PyTorch and ONNX.",
    epilog="Exit status: 0 done, 1 failed, 2 wrong settings or arguments.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (start, stop, status, archive, register, models, scale, infer, version):
    commands.command()(command)
