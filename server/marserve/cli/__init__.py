"""The command lines: `marserve`, `torchserve`, `torch-model-archiver`. One file a command.

    models/       one model: register, scale, infer, …
    measuring/    one model's speed: bench, tune, profile
    changes/      many models at once, and the split of requests: apply, rollout, traffic, …
    local/        without a server: new, archive, fetch, version
    server/       start, stop, status, logs
    requests/     single requests: explain, replay
    top/          `top`: what a server does now, in this terminal
    run/          `run`: one model from a file, in this terminal
    torchserve/   TorchServe's command lines, and `migrate`
    platforms/    what containers start, and their health check
    progress/     what is shown while a command waits
    container     the name by which images call `platforms/container.py`
    healthcheck   the name by which they call `platforms/healthcheck.py`
    command_list  all commands, in the order of `--help`

Commands share `remote` and `credentials` (the server), `options`, `words` and `typed_settings` (what was typed),
`output`, `versions` and `dry_run` (what is shown), `manual` and `source_date`. Ctrl-C ends each command with status 130
and without a traceback. This file sets that up before other imports, so it imports next to nothing itself. `Tidied` has
SIGTERM and SIGHUP end a command as Ctrl-C does.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys

from marserve import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

INTERRUPTED_STATUS = 130
# What writing to a file or a device fails with that takes no more; a closed pipe is no error of a command.
_OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# The first word of `sys.argv` while a command is imported: the script's name, or `-m` for `python -m marserve.cli…`.
PROGRAMS = ("-m", "marserve", "torchserve", "torch-model-archiver", "torch-workflow-archiver")


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once. An exception inside an import might be lost, or printed with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # closed, broken, or in the middle of a write
            continue
    os._exit(INTERRUPTED_STATUS)


# A shell ignores the signal for a job in the background, and Python leaves it so; then it stays ignored.
if os.path.basename(sys.argv[0] if sys.argv else "") in PROGRAMS and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _leave)


def main() -> None:
    """Run `marserve` with this process's arguments and exit with its status."""
    if sys.platform == "win32":
        sys.stderr.write("marserve does not run on Windows (win32): start it in WSL 2, or in a Linux container.\n")
        sys.exit(2)
    if sys.argv[1:2] == ["--version"]:
        print(f"marserve {__version__}")
        sys.exit(0)
    # A model's name, or a dash, may have no character in a terminal's encoding, such as Latin-1.
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="backslashreplace")
    # Late, so that the other command lines do not load what this one draws tables with.
    from marserve.cli.command_list import COMMANDS, build_commands

    # If the first word is no command, all of them are needed for the error.
    # Imports leave many objects and hardly any garbage, and collections would take a tenth of their time.
    gc.disable()
    asked = [word for word in sys.argv[1:2] or _words_to_complete() if word in COMMANDS]
    is_list = not asked and (sys.argv[1:] in ([], ["--help"]) or "_MARSERVE_COMPLETE" in os.environ)
    command = build_commands(asked or COMMANDS, are_listed_only=is_list)
    gc.freeze()
    gc.enable()
    try:
        with Interruptible():
            command()
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        # What is still in the stream would fail once more when Python flushes it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr.write(f"marserve: the output could not be written: {error.strerror}.\n")
        sys.exit(1)


def _words_to_complete() -> list[str]:
    """The command that a shell asks completions for, so that Tab answers without importing all commands.

    Some command if the shell asks only for its completion script; empty if the command is still being typed.
    """
    asked = os.environ.get("_MARSERVE_COMPLETE", "")
    if asked.startswith("source_"):
        return ["version"]
    if not asked.startswith("complete_"):
        return []
    line = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", ""))
    words = line.split(maxsplit=2)
    at_end = len(words) > 2 or (len(words) == 2 and line[-1:].isspace())
    return words[1:2] if at_end else []


class Interruptible:
    """Lets Ctrl-C raise KeyboardInterrupt in a block that must catch it. If the block does not, the status is 130.

    Does nothing in a process that is no command: this package did not set the signal there.
    """

    def __enter__(self) -> None:
        self._is_command = signal.getsignal(signal.SIGINT) is _leave
        if self._is_command:
            self._hook = sys.unraisablehook
            sys.unraisablehook = _leave_if_interrupted
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_command:
            return
        try:
            signal.signal(signal.SIGINT, _leave)
            sys.unraisablehook = self._hook
        except KeyboardInterrupt:
            _leave(signal.SIGINT, None)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            _leave(signal.SIGINT, None)


class Tidied:
    """SIGTERM, and SIGHUP of a closed terminal, leave the block as Ctrl-C does, so that its contexts tidy up.

    Only the first counts: shells and `timeout` send several. What is ignored, as SIGHUP under `nohup`, stays ignored.
    """

    def __enter__(self) -> None:
        self._before = {}
        for number in _TIDY:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, _leave_tidily, _is_leaving):
                self._before[number] = handler
                signal.signal(number, _leave_tidily)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


_TIDY = (signal.SIGTERM, signal.SIGHUP)


def _leave_tidily(number: int, frame: FrameType | None) -> None:
    """Raise the end of the process, with the status of a command that this signal ended."""
    for each in _TIDY:
        if signal.getsignal(each) is _leave_tidily:
            signal.signal(each, _is_leaving)
    sys.exit(128 + number)


def _is_leaving(number: int, frame: FrameType | None) -> None:
    """Do nothing. Where two came at once, Python complains of the second one if its handler is gone by then."""


def _leave_if_interrupted(unraisable: sys.UnraisableHookArgs) -> None:
    """End on Ctrl-C where Python swallows exceptions: in a weak reference's callback or a destructor."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _leave(signal.SIGINT, None)
    sys.__unraisablehook__(unraisable)


__all__ = ["Interruptible", "Tidied", "main"]
