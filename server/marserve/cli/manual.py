"""The manual page `marserve(1)`, written from the commands themselves, in man(7)'s macros.

`python -m marserve.cli.manual > server/man/marserve.1` writes the page that wheels install; a test keeps it current.
It uses the commands' names, help texts and parameters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import typer.main

import marserve
from marserve.cli.command_list import build_commands

_PROGRAM = "marserve"
_STATUSES = (
    ("0", "Done."),
    ("1", "It failed; the sentence on standard error says why."),
    ("2", "Wrong settings or arguments: nothing was tried."),
    ("3", "Of marserve optimise: no build is equal and surely better, the parent stays."),
    ("130", "Ctrl-C; a sentence says what goes on in the server."),
)
_VARIABLES = (
    ("MARSERVE_KEY", "Any key of config.properties, in capitals: MARSERVE_JOB_QUEUE_SIZE=500."),
    ("MARSERVE_CONFIG_FILE, TS_CONFIG_FILE", "The settings where no option names a file."),
    ("MARSERVE_TOKEN", "The key that commands send to a server that asks for one."),
    ("SOURCE_DATE_EPOCH", "The date that archives and snapshots are given."),
)
_FILES = (
    ("config.properties", "Settings, in the folder where the command is started."),
    ("model_store", "Archives, in that folder too."),
    ("logs", "What a server in the background writes."),
    ("key_file.json", "The server's keys, where it asks for them."),
)


def manual() -> str:
    """The page, as it lies in the repository and in the wheel."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    group: Any = typer.main.get_command(build_commands())
    yield '.\\" Written by `python -m marserve.cli.manual`.'
    yield f'.TH MARSERVE 1 "" "{_PROGRAM} {marserve.__version__}" "Commands"'
    yield f".SH NAME\n{_PROGRAM} \\- {_escaped(_without_stop(group.help))}"
    yield f".SH SYNOPSIS\n.B {_PROGRAM}\n.I command\n[\\fIoption\\fR ...] [\\fIargument\\fR ...]"
    yield ".SH DESCRIPTION"
    yield _escaped(
        "Serves model archives (.mar) over REST and gRPC, each model version in worker processes of its own, and asks "
        "a running server to do things. Commands look for the server where `marserve start` would start it from the "
        "same folder with the same settings and environment. Results go to standard output, progress and errors to "
        "standard error; with --json each command prints one JSON document."
    )
    yield ".SH OPTIONS"
    for option in group.params:
        yield from _parameter(option)
    yield ".SH COMMANDS"
    for name, command in group.commands.items():
        yield from _command(name, command)
    yield ".SH EXIT STATUS"
    yield from _terms(_STATUSES)
    yield ".SH ENVIRONMENT"
    yield from _terms(_VARIABLES)
    yield ".SH FILES"
    yield from _terms(_FILES)
    yield ".SH SEE ALSO"
    yield _escaped(
        "torchserve --help, torch-model-archiver --help and torch-workflow-archiver --help: TorchServe's commands, "
        "which come with this one."
    )


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [parameter for parameter in command.params if not _is_option(parameter)]
    options = [parameter for parameter in command.params if _is_option(parameter)]
    words = [f"\\fB{_escaped(name)}\\fR", *(_placeholder(argument) for argument in arguments)]
    words += ["[\\fIoption\\fR ...]"] if options else []
    yield f".SS {' '.join(words)}"
    yield from _paragraphs(command.help)
    for parameter in (*arguments, *options):
        if parameter.help:
            yield from _parameter(parameter)


def _parameter(parameter: Any) -> Iterator[str]:
    if not _is_option(parameter):
        yield f".TP\n{_placeholder(parameter)}"
    else:
        names = ", ".join(f"\\fB{_escaped(name)}\\fR" for name in (*parameter.opts, *parameter.secondary_opts))
        yield f".TP\n{names}{_value(parameter)}"
    yield _escaped(f"{parameter.help}{_default(parameter)}")


def _placeholder(argument: Any) -> str:
    word = f"\\fI{_escaped(argument.metavar or argument.name)}\\fR{' ...' if argument.nargs != 1 else ''}"
    return word if argument.required else f"[{word}]"


def _value(option: Any) -> str:
    """What is typed after an option: its metavar, else its own name in capitals; nothing after a flag."""
    if option.is_flag:
        return ""
    return f" \\fI{_escaped(option.metavar or option.name.upper().replace('_', '-'))}\\fR"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or callable(value) or isinstance(value, bool) or parameter.show_default is False:
        return ""
    shown = f"{value:g}" if isinstance(value, float) else getattr(value, "value", value)
    return f" [default: {shown}]"


def _terms(pairs: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for term, sentence in pairs:
        yield f".TP\n\\fB{_escaped(term)}\\fR\n{_escaped(sentence)}"


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a help text, which are separated by empty lines."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.replace("\b", "").strip())):
        if number:
            yield ".PP"
        yield _escaped(" ".join(paragraph.split()))


def _escaped(text: str) -> str:
    """Text escaped for roff: backslashes, hyphens that can be typed, and lines that would look like a macro."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _without_stop(text: str) -> str:
    return text.strip().rstrip(".")


def _is_option(parameter: Any) -> bool:
    return str(parameter.opts[0]).startswith("-")


if __name__ == "__main__":
    sys.stdout.write(manual())
