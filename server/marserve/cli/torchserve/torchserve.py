"""`torchserve`: TorchServe's command line, with its flags, texts and exit statuses.

It knows TorchServe's flags and texts, and the PID file. `marserve.settings` says what the flags mean.

One thing differs on purpose: `--foreground` ends with the server's own exit status, which TorchServe hides, so that a
supervisor sees that the server failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from marserve.cli.server.pid_file import TORCHSERVE_WORD, AlreadyRunning, PidFile, torchserve_pid_file
from marserve.errors import BadSettings
from marserve.machine.start_watch import StartWatch

TORCHSERVE_VERSION = "0.12.0"
"""The version of TorchServe whose contract this keeps. Its tools compare this one, not marserve's own."""

STOP_WAITS_S = 60.0


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `torchserve` with these arguments, else with this process's, and exit with its status."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    flags = parser().parse_args(words)
    if flags.version:
        _say(f"TorchServe Version is {TORCHSERVE_VERSION}")
        sys.exit(0)
    try:
        pid_file = torchserve_pid_file()
        sys.exit(_stop(pid_file, wait=flags.foreground) if flags.stop else _start(flags, words, pid_file))
    except BadSettings as error:
        _say(error.message)
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """TorchServe's flags."""
    made = argparse.ArgumentParser(
        prog="torchserve",
        description="Start or stop marserve with TorchServe's flags and defaults.",
        epilog="Without --version and --stop the server is started. `marserve --help` shows what else there is.",
    )
    action = made.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="print the version of TorchServe that is kept to")
    action.add_argument("--start", action="store_true", help="start the server")
    action.add_argument("--stop", action="store_true", help="stop the server")
    made.add_argument("--ts-config", metavar="FILE", help="settings; the environment's TS_CONFIG_FILE wins")
    made.add_argument("--model-store", metavar="FOLDER", help="where archives are; needed here or in the settings")
    made.add_argument("--workflow-store", metavar="FOLDER", help="where workflow archives are; else the model store")
    made.add_argument(
        "--models", metavar="[NAME=]LOCATION", nargs="+", help="archives to load at start, or `all` of the model store"
    )
    made.add_argument("--log-config", metavar="FILE", help="a log4j2 configuration")
    made.add_argument("--cpp-log-config", metavar="FILE", help="a log configuration of the C++ backend")
    made.add_argument("--foreground", action="store_true", help="wait for the server's end")
    made.add_argument(
        "--no-config-snapshots", "--ncs", action="store_true", help="neither read nor write snapshots of the settings"
    )
    made.add_argument("--plugins-path", "--ppath", metavar="FOLDER", help="plugins")
    made.add_argument(
        "--disable-token-auth", "--dt", action="store_true", help="let everybody in who can reach the addresses"
    )
    made.add_argument("--enable-model-api", action="store_true", help="let clients register and unregister models")
    return made


def _start(flags: argparse.Namespace, words: Sequence[str], pid_file: PidFile) -> int:
    watch = StartWatch()
    try:
        if pid_file.remove_orphan(os.getpid()):
            _say("Removing orphan pid file.")
        problem = _missing_path(flags)
        if problem:
            _say(problem)
            return 1
        return _start_checked(flags, words, pid_file, watch)
    except AlreadyRunning:
        _say("TorchServe is already running, please use torchserve --stop to stop TorchServe.")
        return 1
    finally:
        watch.close()


def _start_checked(flags: argparse.Namespace, words: Sequence[str], pid_file: PidFile, watch: StartWatch) -> int:
    # Late: `--version` and `--stop`, which are called more often, do not need these.
    from marserve.cli.server.background import start_server
    from marserve.cli.server.foreground import serve
    from marserve.plugins import find_snapshot_store
    from marserve.settings import load_settings

    try:
        settings = load_settings("torchserve", _as_settings(flags), os.environ, Path.cwd(), find_snapshot_store)
        if flags.foreground:
            if flags.log_config:
                _say("--log-config is accepted and has no effect: see log_level, log_format and log_location instead.")
            return serve(settings, pid_file, watch)
    except BadSettings as error:
        _say(error.message)
        return 1
    process = start_server("marserve.cli.torchserve", [*words, "--foreground"], TORCHSERVE_WORD)
    # Written here too, so that an immediate `torchserve --stop` finds it.
    pid_file.claim(process.pid)
    return 0


def _missing_path(flags: argparse.Namespace) -> str | None:
    """An error if a named folder or file is missing, in TorchServe's words and order."""
    if flags.log_config and not Path(flags.log_config).is_file():
        return f"--log-config file not found: {flags.log_config}"
    if flags.cpp_log_config and not Path(flags.cpp_log_config).is_file():
        return f"--cpp-log-config file not found: {flags.cpp_log_config}"
    temporary = os.environ.get("TEMP")
    if temporary and not Path(temporary).is_dir():
        return f"Invalid temp directory: {temporary}, please check TEMP environment variable."
    return None


def settings_of_command(words: Sequence[str]) -> dict[str, object]:
    """The settings, by key, that a command line of `torchserve` gives. Raises ValueError for any other."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return _as_settings(parser().parse_args(list(words)))
    except SystemExit as error:
        raise ValueError(f"{' '.join(words)} is no command of torchserve") from error


def _as_settings(flags: argparse.Namespace) -> dict[str, object]:
    """The given flags as settings."""
    given: dict[str, object] = {
        "ts_config": flags.ts_config,
        "model_store": flags.model_store,
        "workflow_store": flags.workflow_store,
        "load_models": flags.models,
        "cpp_log_config": flags.cpp_log_config,
        "plugins_path": flags.plugins_path,
        "disable_token_authorization": flags.disable_token_auth or None,
        "enable_model_api": flags.enable_model_api or None,
        "config_snapshots": False if flags.no_config_snapshots else None,
    }
    return {key: value for key, value in given.items() if value is not None}


def _stop(pid_file: PidFile, wait: bool) -> int:
    """Ask the server to end. The status is 0 in any case, as TorchServe's."""
    written = pid_file.written_pid()
    if written is None:
        _say("TorchServe is not currently running.")
        return 0
    pid = pid_file.running_pid()
    try:
        if pid is None:
            raise ProcessLookupError
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        _say("TorchServe already stopped.")
        pid_file.release(written)
        return 0
    except PermissionError:
        _say(f"TorchServe (process {pid}) belongs to another user; stop it as that user.")
        return 1
    Path("key_file.json").unlink(missing_ok=True)
    pid_file.release(pid)
    if not wait:
        _say("TorchServe has stopped.")
    elif not pid_file.wait_until_ended(pid, STOP_WAITS_S):
        _say("Stopping TorchServe took too long.")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
