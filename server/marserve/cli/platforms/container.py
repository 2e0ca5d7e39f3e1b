"""The first program of a container: starts what the arguments of `docker run` name, and runs it to its end.

TorchServe's image takes `serve` or a shell's command line, starts the server in the background and then sleeps for ever
(contract §10.7). Here the server stays in the foreground and gets the signals. The container ends with the server, and
with its status.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from marserve.cli.platforms.sagemaker import sagemaker_arguments
from marserve.errors import BadSettings, without_stop

SERVE = "serve"
TOKENS_OFF = "MARSERVE_DISABLE_TOKEN_AUTHORIZATION"

_OPERATOR = re.compile(r"[$`]|^(?:&&?|\|\|?|;|>>?|<)$")
# Flags with which `torchserve` starts no server.
_NO_START = frozenset(("--stop", "--version", "-v", "--help", "-h"))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command of these arguments, else of this process's; exit with its status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    environment = with_defaults(words, os.environ)
    try:
        command = platform_command(words, os.environ) or command_of(words, Path.cwd())
        if is_server(command):
            refuse_unwritable(environment, lambda folder: os.access(folder, os.W_OK | os.X_OK))
    except BadSettings as error:
        print(f"marserve: {error.message}", file=sys.stderr)
        sys.exit(2)
    # Late: the health check imports this module for the functions below.
    from marserve.cli.platforms.first_process import CannotRun, look_after

    try:
        sys.exit(look_after(command, environment))
    except CannotRun as error:
        print(
            f"{without_stop(error)}. Arguments are `serve`, a command, or a command line for the shell.",
            file=sys.stderr,
        )
        sys.exit(error.status)


def with_defaults(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for the command. `serve` turns tokens off, as TorchServe's does, unless the variable is set."""
    made = dict(environment)
    if is_serve(arguments):
        made.setdefault(TOKENS_OFF, "true")
    return made


def is_serve(arguments: Sequence[str]) -> bool:
    """Whether the arguments are the image's own: none, or `serve`."""
    return not arguments or arguments[0] == SERVE


def platform_command(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str] | None:
    """The command if SageMaker gave the word `serve`; None if it is TorchServe's, and for other arguments.

    Raises BadSettings for SageMaker's variables and folders that cannot be used.
    """
    words = sagemaker_arguments(environment) if is_serve(arguments) and len(arguments) < 2 else None
    return None if words is None else ["marserve", *words]


def command_of(arguments: Sequence[str], folder: Path) -> list[str]:
    """The command to run for these arguments of a container that works in `folder`.

    A server runs in the foreground. One word with spaces, and words with a shell's operators, are a shell's command
    line, as for TorchServe's image.
    """
    if is_serve(arguments):
        return ["torchserve", *server_flags(arguments, folder)]
    if any(map(_OPERATOR.search, arguments)) or (len(arguments) == 1 and " " in arguments[0].strip()):
        return [shutil.which("bash") or "/bin/sh", "-c", " ".join(arguments)]
    command = list(arguments)
    if is_server(command) and "--foreground" not in command:
        command.append("--foreground")
    return command


def is_server(command: Sequence[str]) -> bool:
    """Whether this command starts a server."""
    name, rest = Path(command[0]).name, command[1:]
    if name == "torchserve":
        return not _NO_START.intersection(rest)
    return name == "marserve" and "start" in rest[:1] and "--help" not in rest


def refuse_unwritable(environment: Mapping[str, str], can_write: Callable[[str], bool]) -> None:
    """Raise BadSettings if this user may not write the folder `TEMP`, as with a group that the image does not know.

    Without this check the server would name folders that were not chosen here.
    """
    folder = environment.get("TEMP")
    if folder and Path(folder).is_dir() and not can_write(folder):
        user, group = os.geteuid(), os.getegid()
        raise BadSettings(
            f"{folder} (TEMP) may not be written by user {user} of group {group}, or lies in a file system that is "
            f"read-only; give the container group 0 (--user {user}:0, on Kubernetes an fsGroup as well), or mount a "
            "folder there that this user may write",
            key="TEMP",
        )


def server_flags(arguments: Sequence[str], folder: Path) -> list[str]:
    """The flags of the server that `serve` starts. Flags after the word have precedence over the image's."""
    given = list(arguments[1:])
    config = folder / "config.properties"
    names_one = any(flag.partition("=")[0] == "--ts-config" for flag in given)
    return [
        "--start",
        "--foreground",
        *([] if names_one or not config.is_file() else ["--ts-config", str(config)]),
        *given,
    ]


if __name__ == "__main__":
    main()
