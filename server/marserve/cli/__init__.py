"""The command lines: `marserve`, `torchserve`, `torch-model-archiver`. One file a command; nobody imports them."""

from __future__ import annotations


def main() -> None:
    """Run `marserve` with this process's arguments and exit with its status."""
    # Inside, so that the other two command lines do not load what this one draws tables with.
    from marserve.cli.commands import commands

    commands()


__all__ = ["main"]
