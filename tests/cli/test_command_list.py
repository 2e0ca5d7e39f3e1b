"""`marserve` as a whole: which commands there are, and how they take what they cannot use."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

from marserve import cli
from marserve.cli import command_list
from support.command_line import marserve

COMMANDS = ("run", "new", "start", "stop", "status", "archive", "compare", "optimise", "export", "debug", "fetch")
COMMANDS += ("register", "models", "top", "set-default", "traffic", "label", "swap", "shadow", "rollout", "unregister")
COMMANDS += ("scale", "bench", "tune", "check", "profile", "plan", "apply", "undo", "history", "watches", "logs")
COMMANDS += ("log-level", "explain", "replay", "infer", "migrate", "version")


def test_help_lists_every_command() -> None:
    """In the order in which they are needed."""
    ran = marserve("--help")

    assert ran.status == 0
    listed = re.findall(r"^[^\w-]*([a-z][a-z-]+)  ", ran.out, re.MULTILINE)
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_speaks_json(command: str) -> None:
    """`--help` is there, and `--json` for scripts."""
    ran = marserve(command, "--help")

    assert ran.status == 0
    assert "--json" in ran.out


@pytest.mark.parametrize(
    "words", [["frobnicate"], ["models", "--frobnicate"], ["scale", "digits"], ["scale", "m", "x"]]
)
def test_a_usage_error_is_status_2(words: list[str]) -> None:
    """As for wrong settings: the caller has to change what it says."""
    ran = marserve(*words)

    assert ran.status == 2
    assert ran.out == ""


def test_the_module_is_the_command() -> None:
    """`python -m marserve.cli` starts it where no script is installed."""
    ran = subprocess.run([sys.executable, "-m", "marserve.cli", "version"], capture_output=True, text=True, check=False)

    assert ran.returncode == 0
    assert "marserve" in ran.stdout


def test_the_version_is_told_by_a_flag_too() -> None:
    """As most programs have it."""
    ran = marserve("--version")

    assert (ran.status, ran.out) == (0, f"marserve {version('marserve')}\n")


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_what_says_what_there_is_imports_nothing_of_the_server(flag: str) -> None:
    """The list of commands is the one that has imported them."""
    program = "import atexit, sys\nsys.argv[0] = 'marserve'\nfrom marserve import cli\n"
    program += "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\ncli.main()"

    ran = subprocess.run([sys.executable, "-c", program, flag], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    imported = set(ran.stderr.split())
    assert not imported & {"httpx", "fastapi", "msgspec", "yaml"}
    assert {name for name in imported if name.startswith("marserve.") and not name.startswith("marserve.cli")} == set()
    assert ran.stdout.split() == marserve(flag).out.split()


@pytest.mark.parametrize(
    ("line", "completed", "spared"),
    [
        ("marserve reg", "register", {"httpx", "msgspec"}),
        ("marserve fetch --", "--to", {"fastapi", "uvicorn", "marserve.app.server", "marserve.registry"}),
    ],
)
def test_tab_imports_nothing_of_the_server(line: str, completed: str, spared: set[str]) -> None:
    """A command's name is completed from the list, a flag by its command alone."""
    program = "import atexit, sys\nsys.argv[0] = 'marserve'\nfrom marserve import cli\n"
    program += "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\ncli.main()"
    told = {"_MARSERVE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}

    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **told}, capture_output=True, text=True, check=False
    )

    assert completed in ran.stdout.split()
    assert set(ran.stderr.split()) & spared == set()


@pytest.mark.parametrize("command", ["start", "run"])
def test_a_server_in_front_is_started_without_what_other_commands_need(command: str) -> None:
    """An HTTP client alone would be a tenth of the start, and what draws tables a twentieth."""
    program = f"import sys\nfrom marserve.cli.command_list import build_commands\nbuild_commands(['{command}'])\n"
    program += "print({'httpx', 'rich', 'javaproperties', 'marserve.cli.changes.plan'} & set(sys.modules))"

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ran.stdout == "set()\n", ran.stderr


def test_nothing_is_collected_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections would take a tenth of a start; a command itself may run for days."""
    collects = []

    def build(*asked: object, **more: object) -> Callable[[], None]:
        collects.append(gc.isenabled())
        return lambda: collects.append(gc.isenabled())

    monkeypatch.setattr(command_list, "build_commands", build)
    monkeypatch.setattr(sys, "argv", ["marserve", "run"])
    try:
        cli.main()
    finally:
        gc.enable()
        gc.unfreeze()

    assert collects == [False, True]


@pytest.mark.parametrize(
    ("asked", "line", "words"),
    [
        ("", "", []),
        ("source_bash", "", ["version"]),
        ("complete_bash", "marserve", []),
        ("complete_bash", "marserve start", []),
        ("complete_bash", "marserve start ", ["start"]),
        ("complete_zsh", "marserve start --fore", ["start"]),
    ],
)
def test_tab_imports_the_command_alone_whose_options_it_completes(
    monkeypatch: pytest.MonkeyPatch, asked: str, line: str, words: list[str]
) -> None:
    """All of them where the command itself is typed; for a shell's script any one does."""
    monkeypatch.setenv("_MARSERVE_COMPLETE", asked)
    monkeypatch.setenv("COMP_WORDS" if asked.endswith("bash") else "_TYPER_COMPLETE_ARGS", line)

    assert cli._words_to_complete() == words
