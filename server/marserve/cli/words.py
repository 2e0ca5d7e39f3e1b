"""Reads a command's words as people type them: several values after one flag, a flag in place of a value, other names.

Typer takes any word after an option for its value: in `--model-store --foreground` the second word would be a folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Options that take several values in a row, as `torchserve --models a b` does.
SEVERAL = ("--models",)


# What other programs call a command, and what says it here.
CALLED_OTHERWISE = {
    "describe": "`marserve models NAME` describes a model.",
    "list": "`marserve models` lists the models.",
    "ls": "`marserve models` lists the models.",
    "ps": "`marserve models` lists the models, `marserve status` shows the server.",
    "serve": "`marserve run FILE` serves a model, `marserve start` starts a server of many.",
    "predict": "`marserve infer NAME FILE` asks a model.",
    "invoke": "`marserve infer NAME FILE` asks a model.",
    "curl": "`marserve infer NAME FILE` asks a model.",
    "load": "`marserve register ARCHIVE` adds a model.",
    "add": "`marserve register ARCHIVE` adds a model.",
    "deploy": "`marserve register ARCHIVE` adds a model; `marserve apply FILE` makes the server what a file says.",
    "upload": "`marserve register ./ARCHIVE` sends a file and registers it.",
    "unload": "`marserve unregister NAME` takes a model out.",
    "remove": "`marserve unregister NAME` takes a model out.",
    "rm": "`marserve unregister NAME` takes a model out.",
    "delete": "`marserve unregister NAME` takes a model out.",
    "package": "`marserve archive FILE` makes an archive.",
    "pack": "`marserve archive FILE` makes an archive.",
    "download": "`marserve fetch ADDRESS` brings an archive into a folder.",
    "pull": "`marserve fetch ADDRESS` brings an archive into a folder.",
    "rollback": "`marserve undo` is for desired states, `marserve rollout NAME --abort` for a roll-out.",
    "canary": "`marserve rollout NAME VERSION` lets a version take over in steps.",
    "restart": "`marserve stop`, then `marserve start`.",
    "stats": "`marserve top --once` shows what the models do.",
    "monitor": "`marserve top` shows what the models do.",
    "health": "`marserve status` shows the server.",
    "ping": "`marserve status` shows the server.",
    "log": "`marserve logs` shows the logs.",
    "init": "`marserve new NAME` makes a folder with a model.",
    "config": "`marserve start --dry-run` says what is set where.",
}


# Flags of TorchServe's command in the place of a command.
FLAGS_OF_TORCHSERVE = {
    "--start": "`marserve start` starts a server; `torchserve --start` does it with TorchServe's flags.",
    "--stop": "`marserve stop` stops the server, as `torchserve --stop` does.",
}


class Commands(TyperGroup):
    """`marserve` as a whole."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words before the command. Raises a usage error for a flag of `torchserve`, and says what does it."""
        word = args[0] if args else ""
        if word in FLAGS_OF_TORCHSERVE:
            ctx.fail(f"No such option: {word}. {FLAGS_OF_TORCHSERVE[word]}")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Raises a usage error for an unknown one, which names the command that does the same."""
        word = args[0] if args else ""
        if word in CALLED_OTHERWISE and word not in self.commands:
            ctx.fail(f"No such command {word!r}. {CALLED_OTHERWISE[word]}")
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command of `marserve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words. Raises a usage error for an option without its value."""
        options = {word: option for option in self.params for word in option.opts if word.startswith("-")}
        own = {word for option in self.params for word in (*option.opts, *option.secondary_opts)} | {"--help"}
        taking = {word: option for word, option in options.items() if not getattr(option, "is_flag", False)}
        words = list(_spelled_out([word for word in SEVERAL if word in taking], args))
        for word, after in itertools.pairwise([*words, ""]):
            if word == "--":
                break
            if word in taking and after in own:
                raise typer.BadParameter(f"{_wants(taking[word])}; {after} is a flag of its own", ctx, param_hint=word)
            if word in taking and word is words[-1]:
                raise typer.BadParameter(_wants(taking[word]), ctx, param_hint=word)
        return super().parse_args(ctx, words)


def _spelled_out(several: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """`--models a b` as `--models a --models b`."""
    current, has_value = None, False
    for word in words:
        if word.startswith("-"):
            flag, sign, _ = word.partition("=")
            current, has_value = (flag, bool(sign)) if flag in several else (None, False)
        elif current is not None:
            if has_value:
                yield current
            has_value = True
        yield word


def _wants(option: Any) -> str:
    """The value of an option, as its help names it."""
    return f"it takes a value, {option.metavar}" if option.metavar else "it takes a value"
