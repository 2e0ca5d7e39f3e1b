"""The command lines: `marserve`, `torchserve`, `torch-model-archiver`. One file a command; nobody imports them."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `marserve` with this process's arguments and exit with its status."""
    if sys.platform == "win32":
        sys.stderr.write("marserve does not run on Windows (win32): start it in WSL 2, or in a Linux container.\n")
        sys.exit(2)
    # Inside, so that the other two command lines do not load what this one draws tables with.
    from marserve.cli.commands import COMMANDS, build_commands

    # One that is not the first word (help, a wrong one) needs all of them.
    asked = [word for word in sys.argv[1:2] if word in COMMANDS]
    build_commands(asked or COMMANDS)()


__all__ = ["main"]
