"""`man marserve`, and what a shell completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from marserve.cli.command_list import build_commands
from marserve.cli.manual import manual

PAGE = Path(__file__).parents[2] / "server" / "man" / "marserve.1"


def rendered(*program: str) -> subprocess.CompletedProcess[str]:
    """The page in a terminal 80 columns wide."""
    if shutil.which(program[0]) is None:
        pytest.skip(f"{program[0]} is not installed")
    environment = {**os.environ, "MANWIDTH": "80", "LC_ALL": "C.UTF-8"}
    return subprocess.run([*program, str(PAGE)], capture_output=True, text=True, check=False, env=environment)


def test_the_manual_page_is_what_the_commands_say() -> None:
    """Mended with `python -m marserve.cli.manual > server/man/marserve.1`."""
    assert PAGE.read_text("utf-8") == manual()


def test_every_command_and_option_stands_in_the_manual_page() -> None:
    """As they are typed; a hyphen that is no minus could not be copied."""
    text = PAGE.read_text("utf-8")
    group = typer.main.get_command(build_commands())
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f".SS \\fB{name.replace('-', chr(92) + '-')}\\fR" in text
        for parameter in command.params:
            for word in parameter.opts:
                assert not word.startswith("-") or word.replace("-", "\\-") in text or not parameter.help


def test_the_manual_page_renders_without_a_warning() -> None:
    """man-db asks groff, with every warning on."""
    shown = rendered("man", "--warnings", "--local-file", "--encoding=UTF-8")

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "NAME\n       marserve - A model server" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_the_manual_page_has_no_error_for_mandoc() -> None:
    """What BSDs and Alpine read it with. Only that it has no date is remarked: two builds are alike."""
    shown = rendered("mandoc", "-T", "lint", "-W", "warning")

    assert [line for line in shown.stdout.splitlines() if "missing date" not in line] == []


def completions(shell: str, *, variables: dict[str, str]) -> str:
    """What the completion script of this shell is told."""
    asked = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'marserve'; from marserve.cli import main; main()"],
        env={**os.environ, "_MARSERVE_COMPLETE": f"complete_{shell}", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    return asked.stdout


def test_fish_and_zsh_are_told_commands_with_their_help() -> None:
    """`marserve reg`, then Tab."""
    zsh = completions("zsh", variables={"_TYPER_COMPLETE_ARGS": "marserve reg"})
    fish = completions(
        "fish", variables={"_TYPER_COMPLETE_ARGS": "marserve reg", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    )

    assert '"register":"Register an archive' in zsh
    assert fish.startswith("register\tRegister an archive")
