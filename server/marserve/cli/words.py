"""Reads a command's words as people type them: several values after one flag, and a flag in place of a value.

Typer takes any word after an option for its value: in `--model-store --foreground` the second word would be a folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

# Options that take several values in a row, as `torchserve --models a b` does.
SEVERAL = ("--models",)


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
