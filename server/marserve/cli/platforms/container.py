"""The first program of a container: what the arguments of `docker run` start, and looking after it until it ends.

TorchServe's image takes `serve` or a shell's command line, leaves the server in the background and sleeps beside it for
ever (contract §10.7). Here a server stays in front, signals reach it, and the container ends with it, with its status.
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
# What `torchserve` does instead of starting a server.
_NO_START = frozenset(("--stop", "--version", "-v", "--help", "-h"))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run what these arguments, else this process's, ask for; exit with its status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    environment = with_defaults(words, os.environ)
    try:
        command = platform_command(words, os.environ) or command_of(words, Path.cwd())
        if is_server(command):
            refuse_unwritable(environment, lambda folder: os.access(folder, os.W_OK | os.X_OK))
    except BadSettings as error:
        print(f"marserve: {error.message}", file=sys.stderr)
        sys.exit(2)
    # Late: the functions above are asked by the health check as well.
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
    """The environment of what is started: `serve` switches tokens off, as TorchServe's does, unless they are set."""
    made = dict(environment)
    if is_serve(arguments):
        made.setdefault(TOKENS_OFF, "true")
    return made


def is_serve(arguments: Sequence[str]) -> bool:
    """Whether the container is to do what its image does by itself."""
    return not arguments or arguments[0] == SERVE


def platform_command(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str] | None:
    """The command where `serve` is SageMaker's word and not TorchServe's; None elsewhere.

    Raises BadSettings for what SageMaker's variables and folders cannot mean.
    """
    words = sagemaker_arguments(environment) if is_serve(arguments) and len(arguments) < 2 else None
    return None if words is None else ["marserve", *words]


def command_of(arguments: Sequence[str], folder: Path) -> list[str]:
    """The command to run for these arguments of a container that works in `folder`.

    A server is kept in front. One word with spaces, and words that only a shell understands, are a command line, as
    for TorchServe's image.
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
    """Raise BadSettings where `TEMP` is a folder that this user may not write, as of a group that the image knows not.

    Without it the server would say the same of folders that were not chosen here.
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
    """The flags of the server that `serve` starts; what follows the word goes before what the image would say."""
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
