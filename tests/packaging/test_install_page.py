"""`docs/deploy/install.md`, as far as it can be typed in the environment of the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from marserve import cli
from support.commands import addresses, type_in
from support.distributions import ROOT, build
from support.pages import block
from support.server import free_ports

PAGE = "docs/deploy/install.md"
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def _marserve_is_a_command() -> None:
    """The console script stands beside this interpreter."""
    if not (PROGRAMS / "marserve").exists():
        pytest.skip("marserve runs from its sources here: there is no command to type")


def test_the_page_names_the_versions_that_are_asked_for() -> None:
    """Each package of pyproject.toml once, but for marserve's own: its client, and the extra `ts`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = {line.partition(";")[0] for line in project["dependencies"]}
    asked |= {line for extra in project["optional-dependencies"].values() for line in extra}
    asked = {line for line in asked if not line.startswith("marserve-")}

    section = (ROOT / PAGE).read_text("utf-8").split("### Versions of other packages", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]

    assert sorted(re.findall(r"`([^`]*>=[^`]*)`", "".join(rows))) == sorted(asked)


@pytest.mark.system
def test_the_first_answer_comes_as_the_page_has_it(tmp_path: Path) -> None:
    """Archive, start, ask, stop; nothing but the port is another. No server is left."""
    (tmp_path / "hello.py").write_text(block(PAGE, "hello.py"))
    (tmp_path / "tmp").mkdir()
    ports = free_ports(5)
    typed = block(PAGE, "answer").replace(":8080", f":{ports[0]}")

    variables = {**addresses(*ports), "TMPDIR": str(tmp_path / "tmp")}
    try:
        ran = type_in(typed, tmp_path, PROGRAMS, variables)
    finally:
        again = type_in("marserve stop --kill --timeout 5", tmp_path, PROGRAMS, variables)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Hello, world!" in ran.stdout
    assert "No server runs" in again.stdout + again.stderr


def test_the_first_lines_make_an_environment_and_install_into_it(tmp_path: Path) -> None:
    """A shell reads them; `make package-test` types them."""
    typed = block(PAGE, "install")

    read = subprocess.run(["bash", "-n"], input=typed, capture_output=True, text=True, check=False)

    assert (read.returncode, read.stderr) == (0, "")
    made, *between, installed = typed.splitlines()
    assert made.endswith(" -m venv marserve-env")
    assert any("marserve-env/bin" in line for line in between)
    assert installed == "pip install marserve"


@pytest.mark.long  # ten seconds of a processor, most of them pip's
def test_the_first_lines_install_a_wheel_into_an_environment(tmp_path: Path) -> None:
    """The same lines with the wheel alone: what it asks for is left out here, and comes in `make package-test`."""
    wheel = build("wheel", tmp_path / "wheels")
    typed = block(PAGE, "install")
    assert typed.endswith("pip install marserve\n")

    variables = {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}
    ran = type_in(f"{typed}pip show --files marserve\n", tmp_path, PROGRAMS, variables)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "marserve-env" / "bin" / "marserve").exists()
    assert (tmp_path / "marserve-env" / "share" / "man" / "man1" / "marserve.1").exists()


def test_extras_of_the_page_are_there() -> None:
    """The line names extras that the wheel has; `make package-test` installs with it."""
    import importlib.metadata

    names = block(PAGE, "extras").split("[")[1].split("]")[0].split(",")

    assert set(names) <= set(importlib.metadata.metadata("marserve").get_all("Provides-Extra") or [])


def test_every_extra_has_a_row_that_says_what_it_is_for() -> None:
    """But for `examples`, which `make serve` installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    section = (ROOT / PAGE).read_text("utf-8").split("## A first answer", 1)[0]
    rows = set(re.findall(r"^\| `([a-z]+)` \| \S", section, re.MULTILINE))

    assert set(project["optional-dependencies"]) - {"examples"} <= rows


def shell(name: str, script: str, folder: Path) -> str:
    """What this shell prints for a script. It starts without anybody's start-up files."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    flags = {"bash": ["--norc", "--noprofile"], "zsh": ["--no-rcs"], "fish": ["--no-config"]}[name]
    path = folder / "script"
    path.write_text(script)
    environment = {
        **os.environ,
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
    }
    ran = subprocess.run(
        [name, *flags, str(path)], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.system
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """What Tab calls, after the page's line: the function that was registered for the command."""
    ask = """
        complete -p marserve > /dev/null
        COMP_WORDS=({words})
        COMP_CWORD={last}
        _marserve_completion marserve
        echo "${{COMPREPLY[*]}}"
    """
    typed = ("marserve reg", "marserve start --fore")
    asked = [ask.format(words=words, last=len(words.split()) - 1) for words in typed]
    script = block(PAGE, "complete-bash") + "".join(asked)

    assert shell("bash", script, tmp_path).splitlines() == ["register", "--foreground"]


def test_zsh_takes_the_page_s_lines(tmp_path: Path) -> None:
    """The completion is registered for `marserve`; what it is told is tested beside the manual page."""
    script = block(PAGE, "complete-zsh") + "print -r -- ${_comps[marserve]}\n"

    assert shell("zsh", script, tmp_path).strip() == "_marserve_completion"


def test_fish_completes_commands(tmp_path: Path) -> None:
    """fish can be asked what it would complete."""
    script = block(PAGE, "complete-fish") + 'complete --do-complete "marserve reg"\n'

    assert shell("fish", script, tmp_path).startswith("register\tRegister an archive")


def test_windows_is_told_that_there_is_no_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with the next step, before anything of Unix is imported."""
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(SystemExit) as ended:
        cli.main()

    assert ended.value.code == 2
    assert "WSL 2" in capsys.readouterr().err
